from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator

import numpy as np
import pytest
from vllm.multimodal.media.connector import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from tests.entrypoints.openai.http_rig import wav_base64
from tests.entrypoints.openai.media.clips import mp4, png
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.config.pipeline import Modality
from vllm_omni.entrypoints.openai.media.connector import (
    CONNECTOR,
    AttachedMediaStore,
    install_connector,
)
from vllm_omni.entrypoints.openai.media.fetch import MediaFetcher
from vllm_omni.entrypoints.openai.media.loader import MediaLoader, MediaSource, source_from_url
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.errors import BadRequestError, ConfigError

CLIP = mp4(sound_s=1.0)
PROCESSOR = "Qwen2VLVideoProcessor"


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[AttachedMediaStore]:
    monkeypatch.delenv("VLLM_MEDIA_CONNECTOR", raising=False)
    pool = MediaPool(2)
    limits = ServerLimits(media_fetch="public")
    store = AttachedMediaStore(MediaLoader(limits, MediaFetcher("public"), pool))
    install_connector(store)
    yield store
    pool.close()


def connector() -> MediaConnector:
    """As vLLM's renderer makes one for each message."""
    return MEDIA_CONNECTOR_REGISTRY.load(CONNECTOR, media_io_kwargs=None)


async def test_handles_give_what_was_attached(store: AttachedMediaStore) -> None:
    sources = [
        MediaSource("a", base64=wav_base64(1600)),
        source_from_url(data_url("image/png", png(9, 7)), "b", Modality.IMAGE),
        source_from_url(data_url("video/mp4", CLIP), "c", Modality.VIDEO),
    ]
    with store.attach(sources) as attached:
        samples, rate = await connector().fetch_audio_async(attached.handle(0))
        image = await connector().fetch_image_async(attached.handle(1))
        video = await connector().fetch_video_async(attached.handle(2), video_processor=PROCESSOR)
    assert (samples.shape, samples.dtype, rate) == ((1600,), np.float32, 16000)
    assert image.media.size == (9, 7)
    assert video.media[0].shape[1:] == (48, 64, 3)
    assert len(store) == 0


async def test_a_video_whose_sound_is_heard_is_fetched_once(
    store: AttachedMediaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    async def fetch(self: MediaFetcher, url: str, max_bytes: int, field: str) -> bytes:
        fetched.append((url, max_bytes, field))
        return CLIP

    monkeypatch.setattr(MediaFetcher, "fetch", fetch)
    source = source_from_url("https://media.example/a.mp4", "v", Modality.VIDEO)
    with store.attach([source]) as attached:
        video, (samples, rate) = await asyncio.gather(
            connector().fetch_video_async(attached.handle(0), video_processor=PROCESSOR),
            connector().fetch_audio_async(attached.handle(0)),
        )
    assert fetched == [("https://media.example/a.mp4", ServerLimits().max_video_bytes, "v")]
    assert len(video.media[0])
    assert samples.size / rate == pytest.approx(1.0, abs=0.2)


async def test_a_video_without_sound_says_so(store: AttachedMediaStore) -> None:
    source = source_from_url(data_url("video/mp4", mp4()), "v", Modality.VIDEO)
    with (
        store.attach([source]) as attached,
        pytest.raises(BadRequestError, match="video has no sound") as caught,
    ):
        await connector().fetch_audio_async(attached.handle(0))
    assert caught.value.field == "v"


async def test_a_handle_is_worth_nothing_afterwards(store: AttachedMediaStore) -> None:
    with store.attach([MediaSource("a", base64=wav_base64(160))]) as attached:
        handle = attached.handle(0)
    with pytest.raises(BadRequestError, match="http, https or data"):
        await connector().fetch_audio_async(handle)


@pytest.mark.parametrize("url", ["http://127.0.0.1/x.png", "http://[::1]/", "file:///etc/passwd"])
async def test_other_routes_of_vllm_are_bound_by_the_same_rules(
    store: AttachedMediaStore, url: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        await connector().fetch_image_async(url)
    assert caught.value.field == "image_url"


async def test_other_routes_of_vllm_may_send_data(store: AttachedMediaStore) -> None:
    image = await connector().fetch_image_async(data_url("image/png", png(5, 6)))
    assert image.media.size == (5, 6)


async def test_nothing_is_read_on_the_loop(store: AttachedMediaStore) -> None:
    with pytest.raises(NotImplementedError):
        connector().fetch_image(data_url("image/png", png()))


def test_another_connector_is_refused(
    store: AttachedMediaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", "http")
    with pytest.raises(ConfigError, match="VLLM_MEDIA_CONNECTOR=http"):
        install_connector(store)
