"""The media of a request on their way into vLLM's renderer, which sees handles instead of URLs.

vLLM's own connector would connect anywhere, decode without our bounds and name no field. Ours is
registered in its place for this process: it knows the handles of running requests, and treats
any other URL (of vLLM's further routes) by the same rules.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.media.connector import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.video import get_video_loader_backend_for_processor

from vllm_omni.config.pipeline import Modality
from vllm_omni.entrypoints.openai.media.loader import MediaLoader, MediaSource, source_from_url
from vllm_omni.entrypoints.openai.media.sources import EncodedMedia
from vllm_omni.errors import ConfigError

CONNECTOR: Final = "omni"
"""Our name in vLLM's registry of connectors."""

_VARIABLE: Final = "VLLM_MEDIA_CONNECTOR"
_SCHEME: Final = "omni-media:"


@dataclass(slots=True)
class AttachedMedia:
    """The media of one request. Each item is read once, however often it is asked for."""

    token: str
    sources: Sequence[MediaSource]
    reads: dict[int, asyncio.Task[EncodedMedia]] = field(default_factory=dict)

    def handle(self, index: int) -> str:
        """What stands in the messages for an item."""
        return f"{_SCHEME}{self.token}/{index}"


class AttachedMediaStore:
    """Media of the requests that are being rendered."""

    def __init__(self, loader: MediaLoader) -> None:
        self.loader = loader
        self._attached: dict[str, AttachedMedia] = {}

    def __len__(self) -> int:
        return len(self._attached)

    @contextmanager
    def attach(self, sources: Sequence[MediaSource]) -> Iterator[AttachedMedia]:
        """Keep a request's media for as long as it is rendered."""
        media = AttachedMedia(secrets.token_urlsafe(16), sources)
        self._attached[media.token] = media
        try:
            yield media
        finally:
            del self._attached[media.token]
            for task in media.reads.values():
                task.cancel()

    async def read(self, url: str, kind: Modality) -> EncodedMedia:
        """The encoded bytes behind a handle or another URL."""
        token, _, index = url.removeprefix(_SCHEME).partition("/")
        media = self._attached.get(token) if url.startswith(_SCHEME) else None
        if media is None:
            source = source_from_url(url, f"{kind}_url", kind)
            self.loader.check([source])
            return await self.loader.read(source)
        item = int(index)
        if item not in media.reads:
            media.reads[item] = asyncio.ensure_future(self.loader.read(media.sources[item]))
        return await asyncio.shield(media.reads[item])


def install_connector(store: AttachedMediaStore) -> None:
    """Make vLLM's renderers in this process take media from `store`.

    Raises:
        ConfigError: the operator chose another connector, which knows nothing of our bounds.
    """
    chosen = os.environ.setdefault(_VARIABLE, CONNECTOR)
    if chosen != CONNECTOR:
        raise ConfigError(
            f"{_VARIABLE}={chosen}: media of requests are read within this server's own limits; "
            "unset it"
        )

    @MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)
    class _Connector(OmniMediaConnector):
        media = store


class OmniMediaConnector(MediaConnector):  # type: ignore[misc]
    """Reads media as `AttachedMediaStore` allows. Only the asynchronous half is used here."""

    media: AttachedMediaStore

    async def fetch_audio_async(self, audio_url: str) -> tuple[Any, float]:
        encoded = await self.media.read(audio_url, Modality.AUDIO)
        audio = await self.media.loader.decode(encoded)
        return audio.samples, audio.sample_rate_hz

    async def fetch_image_async(
        self, image_url: str, *, image_mode: str | None = "RGB"
    ) -> MediaWithBytes[Any]:
        encoded = await self.media.read(image_url, Modality.IMAGE)
        return await self.media.loader.image(encoded, self._image_reader(image_mode))

    async def fetch_video_async(
        self,
        video_url: str,
        *,
        image_mode: str | None = "RGB",
        video_processor: str | None = None,
    ) -> MediaWithBytes[Any]:
        encoded = await self.media.read(video_url, Modality.VIDEO)
        options = dict(self.media_io_kwargs.get("video", {}))
        if "video_backend" not in options and (
            backend := get_video_loader_backend_for_processor(video_processor)
        ):
            options["video_backend"] = backend
        reader = VideoMediaIO(self._image_reader(image_mode), **options)
        return await self.media.loader.video(encoded, reader)

    def _image_reader(self, image_mode: str | None) -> ImageMediaIO:
        return ImageMediaIO(**({"image_mode": image_mode} | self.media_io_kwargs.get("image", {})))

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        """The synchronous half would block the loop and pass our bounds."""
        raise NotImplementedError("media are read asynchronously by this server")

    async def load_from_url_async(
        self, url: str, media_io: Any, *, fetch_timeout: int | None = None
    ) -> Any:
        """As above: every kind of media has its own way in."""
        raise NotImplementedError("media of this kind are not read by this server")
