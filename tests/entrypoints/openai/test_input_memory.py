"""What many requests send together is bounded, as it was sent and as it was decoded."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.entrypoints.openai.http_rig import Rig, TextParts, answers, say, serving
from tests.fakes import eventually
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.entrypoints.openai.input_memory import FREE_BYTES, InputMemory, hold
from vllm_omni.errors import BadRequestError, OverloadedError

BOUND = 1_500_000


def silence(num_samples: int) -> list[dict[str, Any]]:
    """A small file of many samples."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(num_samples, np.int16), 48_000, format="FLAC")
    data = base64.b64encode(file.getvalue()).decode()
    assert len(data) < FREE_BYTES, "else the body counts too"
    return [{"type": "input_audio", "input_audio": {"data": data, "format": "flac"}}]


@pytest.fixture
async def rig(text_parts: TextParts) -> AsyncIterator[Rig]:
    async with serving(text_parts, limits=ServerLimits(max_input_bytes=BOUND)) as rig:
        rig.asr.script = answers("words")
        yield rig


def test_a_share_is_given_back_and_small_requests_are_free() -> None:
    memory = InputMemory(1000)
    with memory.share() as one:
        one.add(FREE_BYTES + 900)
        with memory.share() as other:
            other.add(FREE_BYTES)
            with pytest.raises(OverloadedError):
                other.add(101)
        assert memory.num_bytes == 900
        with pytest.raises(BadRequestError) as caught:
            hold(101, "messages[0]")
        assert caught.value.field == "messages[0]"
    assert memory.num_bytes == 0


async def test_small_files_of_much_sound_are_refused_by_what_they_hold(rig: Rig) -> None:
    fits = await rig.chat(content=silence(300_000))
    alone = await rig.chat(content=silence(500_000))
    together = await rig.chat(content=silence(300_000) * 2)

    assert fits.status_code == 200, fits.text
    for refused, index in ((alone, 0), (together, 1)):
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == f"messages[0].content[{index}].input_audio.data"
        assert str(BOUND) in error["message"]


async def test_media_of_running_requests_count_until_they_are_over(rig: Rig) -> None:
    rig.thinker.script = None
    running = asyncio.create_task(rig.chat(content=silence(300_000)))
    await eventually(lambda: len(rig.thinker.added) == 1)

    refused = await rig.chat(content=silence(300_000))
    rig.thinker.script = answers("yes")
    text = await rig.chat()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await eventually(lambda: bool(rig.thinker.abort_calls))
    after = await rig.chat(content=silence(300_000))

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert refused.headers["retry-after"] == "1"
    assert text.status_code == after.status_code == 200


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/tokenize"])
async def test_bodies_that_arrive_slowly_count_together(rig: Rig, url: str) -> None:
    sent, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        yield b'{"a": "' + b"x" * 1_000_000
        sent.release()
        await go_on.wait()
        yield b'"}'

    async def post() -> int:
        headers = {"content-type": "application/json"}
        return (await rig.http.post(url, content=slow_body(), headers=headers)).status_code

    first = asyncio.create_task(post())
    await sent.acquire()
    body = {**say("x" * 1_000_000), "prompt": "x"}
    second = await rig.http.post(url, json=body)
    small = await rig.chat()
    go_on.set()

    assert second.status_code == 503, second.text
    assert second.json()["error"]["code"] == "overloaded"
    assert small.status_code == 200
    assert await first == 400
