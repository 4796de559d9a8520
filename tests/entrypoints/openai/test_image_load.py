"""Pictures under load: refused before decoding, stopped when nobody waits, never on the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.http_rig import TextParts, live
from tests.entrypoints.openai.picture_rig import picture_server, pixels, png
from tests.fakes import eventually, failure_output
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.engine.messages import StageOutput, StageRequest
from vllm_omni.entrypoints.openai.media import image_loader
from vllm_omni.outputs.media import Frames, StepProgress


def half_done(request: StageRequest) -> Iterable[StageOutput]:
    yield StageOutput(request.request_id, progress=StepProgress(2, 4))


async def test_a_burst_is_refused_before_a_picture_is_decoded(
    text_parts: TextParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    original = image_loader.decode_image

    def counted(media: Any, limits: Any) -> Any:
        decoded.append(media.field)
        return original(media, limits)

    monkeypatch.setattr(image_loader, "decode_image", counted)
    files = [("image", ("a.png", png(200, 200), "image/png"))]
    limits = ServerLimits(max_in_flight=4)
    async with picture_server(text_parts.args, limits=limits, script=half_done) as rig:
        # All at once: nobody is in when the first of them are looked at.
        tasks = [asyncio.create_task(rig.edit(files)) for _ in range(50)]
        await eventually(lambda: sum(task.done() for task in tasks) == 46)
        await eventually(lambda: len(rig.replica.added) == 4)
        refused = [task.result() for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: sum(map(len, rig.replica.abort_calls)) == 4)

        assert {response.status_code for response in refused} == {503}
        assert {response.headers["retry-after"] for response in refused} == {"1"}
        assert len(decoded) == 4
        rig.omni.check_admission(4)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_pictures(
    text_parts: TextParts, stream: bool
) -> None:
    async with picture_server(text_parts.args, script=half_done) as rig, live(rig) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            body = {"prompt": "a fox", "n": 2, "stream": stream}
            request = asyncio.create_task(http.post("/v1/images/generations", json=body))
            await eventually(lambda: len(rig.replica.added) == 2)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

        await eventually(lambda: sum(map(len, rig.replica.abort_calls)) == 2)
        await eventually(lambda: rig.omni._admission.in_flight == 0)


async def test_an_error_after_the_first_event_is_an_event(text_parts: TextParts) -> None:
    def fails(request: StageRequest) -> Iterable[StageOutput]:
        yield StageOutput(request.request_id, progress=StepProgress(1, 4))
        yield failure_output(request.request_id, "no memory", "out_of_memory")

    async with picture_server(text_parts.args, script=fails) as rig:
        streamed = await rig.generate(stream=True)
        whole = await rig.generate()

    assert '"code": "out_of_memory"' in streamed.text or streamed.status_code == 503
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "out_of_memory")
    assert whole.headers["retry-after"] == "1"


async def test_an_end_without_a_picture_is_an_error(text_parts: TextParts) -> None:
    def ends(request: StageRequest) -> Iterable[StageOutput]:
        yield StageOutput(request.request_id, True)

    async with picture_server(text_parts.args, script=ends) as rig:
        whole = await rig.generate()
        streamed = await rig.generate(stream=True)

    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "request_failed")
    assert '"code": "request_failed"' in streamed.text


async def test_encoding_large_pictures_leaves_the_loop_free(text_parts: TextParts) -> None:
    made = Frames.of(pixels(1, 1, 2048, 2048)[0])

    def large(request: StageRequest) -> Iterable[StageOutput]:
        yield StageOutput(request.request_id, True, frames=made)

    async with picture_server(text_parts.args, script=large) as rig:
        request = asyncio.create_task(rig.generate(n=4, output_format="webp"))
        longest_s, num_looks = 0.0, 0
        while not request.done():
            began_s = time.monotonic()
            assert (await rig.http.get("/health")).status_code == 200
            longest_s = max(longest_s, time.monotonic() - began_s)
            num_looks += 1
            await asyncio.sleep(0.01)

    assert (await request).status_code == 200
    assert num_looks > 20
    assert longest_s < 0.5
