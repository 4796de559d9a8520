"""Too much at once: refused in milliseconds, before anything is decoded; the loop stays free."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import pytest

from tests.entrypoints.openai.http_rig import (
    TextParts,
    audio_part,
    say,
    serving,
    speaks_pcm,
    tone,
    wav_base64,
)
from tests.fakes import eventually
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.entrypoints.openai.media import loader


async def test_a_burst_over_the_queue_is_refused_before_decoding(
    text_parts: TextParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    original = loader.decode_audio

    def counted(media: Any, limits: Any) -> Any:
        decoded.append(media.field)
        return original(media, limits)

    monkeypatch.setattr(loader, "decode_audio", counted)
    recording = audio_part(wav_base64(160_000))
    async with serving(text_parts, limits=ServerLimits(max_in_flight=4)) as rig:
        running = [asyncio.create_task(rig.chat()) for _ in range(4)]
        rig.thinker.script = None
        await eventually(lambda: len(rig.thinker.added) == 4)

        began_s = time.monotonic()
        refused = await asyncio.gather(*(rig.chat(content=[recording]) for _ in range(100)))
        each_s = (time.monotonic() - began_s) / 100
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await eventually(lambda: sum(map(len, rig.thinker.abort_calls)) == 4)

        rig.thinker.script = lambda request: []
        assert {response.status_code for response in refused} == {503}
        assert {response.json()["error"]["code"] for response in refused} == {"overloaded"}
        assert all(response.headers["retry-after"] == "1" for response in refused)
        assert each_s < 0.05
        assert decoded == []
        rig.omni.check_admission(4)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", say()),
        ("/v1/chat/completions", say(stream=True)),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/audio/speech", {"input": "Hello."}),
        ("/v1/responses", {"model": "tiny", "input": "hi"}),
    ],
)
async def test_every_route_refuses_when_full(
    text_parts: TextParts, url: str, body: dict[str, Any]
) -> None:
    async with serving(text_parts, limits=ServerLimits(max_in_flight=1)) as rig:
        rig.thinker.script = None
        running = asyncio.create_task(rig.chat())
        await eventually(lambda: bool(rig.thinker.added))

        response = await rig.http.post(url, json=body)

        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert response.status_code == 503, response.text
        assert response.headers["retry-after"] == "1"


class LoopWatch:
    """How long the loop was away from its other work, at most."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def run(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(0.01)
            self.worst_s = max(self.worst_s, time.monotonic() - before_s - 0.01)


@pytest.mark.parametrize("form", ["mp3", "opus", "flac", "wav"])
async def test_health_answers_while_two_minutes_are_encoded(
    text_parts: TextParts, form: str
) -> None:
    async with serving(text_parts) as rig:
        rig.voice.script = speaks_pcm(*[tone(22050)] * 120)
        watch = LoopWatch()
        watching = asyncio.create_task(watch.run())
        began_s = time.monotonic()
        encoding = asyncio.create_task(
            rig.chat(modalities=["audio"], audio={"format": form, "voice": "default"})
        )
        num_healthy = 0
        while not encoding.done():
            num_healthy += (await rig.http.get("/health")).status_code == 200
            await asyncio.sleep(0.02)
        watching.cancel()
        elapsed_s = time.monotonic() - began_s

        answer = await encoding
        data = base64.b64decode(answer.json()["choices"][0]["message"]["audio"]["data"])
        assert len(data) > 100_000
        assert num_healthy > 0
        # Were it done on the loop, the loop would be away for nearly all of the time.
        assert watch.worst_s < max(0.3, elapsed_s / 2)


async def test_health_answers_while_a_recording_is_decoded(text_parts: TextParts) -> None:
    async with serving(text_parts) as rig:
        watch = LoopWatch()
        watching = asyncio.create_task(watch.run())
        recording = wav_base64(118 * 48_000, 48_000)
        rig.asr.script = rig.thinker.script
        response = await rig.chat(content=[audio_part(recording)])
        watching.cancel()

        assert response.status_code == 200, response.text
        assert watch.worst_s < 1.0
