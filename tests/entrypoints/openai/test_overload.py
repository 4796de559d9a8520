"""Too much at once: refused in milliseconds, before anything is decoded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.entrypoints.openai.http_rig import (
    TextParts,
    answers,
    audio_part,
    say,
    serving,
    wav_base64,
)
from tests.fakes import eventually
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.entrypoints.openai import admission, text_answers
from vllm_omni.entrypoints.openai.admission import GENERATING
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


async def test_a_burst_on_an_idle_server_prepares_no_more_than_can_run(
    text_parts: TextParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All come before the first is in flight: what is counted there is no bound yet."""
    parsed: list[int] = []
    decoded: list[str] = []
    release = asyncio.Event()
    read_json = text_answers.read_json

    async def counted_parse(request: Any) -> Any:
        parsed.append(1)
        return await read_json(request)

    async def held_load(self: Any, sources: Any) -> Any:
        decoded.extend(source.field for source in sources)
        await release.wait()
        return ()

    monkeypatch.setattr(text_answers, "read_json", counted_parse)
    monkeypatch.setattr(loader.MediaLoader, "load", held_load)
    body = json.dumps(say(content=[audio_part(wav_base64(160_000))])).encode()
    async with serving(text_parts, limits=ServerLimits(max_in_flight=4)) as rig:

        async def post() -> Any:
            return await rig.http.post(
                "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
            )

        requests = [asyncio.create_task(post()) for _ in range(100)]
        await eventually(lambda: sum(task.done() for task in requests) == 96)
        refused = [task.result() for task in requests if task.done()]
        waiting = [task for task in requests if not task.done()]
        release.set()
        await asyncio.gather(*waiting)

        assert {response.status_code for response in refused} == {503}
        assert {response.headers["retry-after"] for response in refused} == {"1"}
        assert (len(parsed), len(decoded)) == (4, 4)
        with contextlib.ExitStack() as places:  # all were given back
            for _ in range(4):
                places.enter_context(rig.omni.place())


def raw_scope(url: str) -> dict[str, Any]:
    """A POST as the HTTP server hands it over."""
    return {
        "type": "http",
        "method": "POST",
        "path": url,
        "raw_path": url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"90000000")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("omni", 80),
        "client": ("somebody", 1),
    }


@pytest.mark.parametrize("url", sorted(GENERATING))
async def test_a_refusal_when_full_reads_no_body(text_parts: TextParts, url: str) -> None:
    async with serving(text_parts, limits=ServerLimits(max_in_flight=1)) as rig:
        sent: list[Any] = []

        async def receive() -> Any:
            raise AssertionError("the body was asked for")

        async def send(message: Any) -> None:
            sent.append(message)

        rig.omni._admission.acquire()
        await rig.app(raw_scope(url), receive, send)
        rig.omni._admission.release()

        assert sent[0]["status"] == 503
        assert (b"retry-after", b"1") in sent[0]["headers"]
        assert json.loads(sent[1]["body"])["error"]["code"] == "overloaded"


async def test_a_body_on_its_way_holds_no_place(text_parts: TextParts) -> None:
    async with serving(text_parts, limits=ServerLimits(max_in_flight=1)) as rig:
        arrives = asyncio.Event()

        async def slow_body() -> AsyncIterator[bytes]:
            yield b'{"model": "tiny", '
            await arrives.wait()
            yield b'"messages": [{"role": "user", "content": "hi"}]}'

        headers = {"content-type": "application/json"}
        slow = asyncio.create_task(
            rig.http.post("/v1/chat/completions", content=slow_body(), headers=headers)
        )
        assert (await rig.chat()).status_code == 200
        arrives.set()
        assert (await slow).status_code == 200


@pytest.mark.parametrize("sends", [True, False])
async def test_a_client_that_does_not_send_or_read_is_ended(
    text_parts: TextParts, monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    monkeypatch.setattr(admission, "_LINGER_S", 0.1)
    async with serving(text_parts, limits=ServerLimits(request_timeout_s=0.2)) as rig:
        rig.thinker.script = answers(*["word "] * 200)
        never = asyncio.Event()
        sent: list[Any] = []
        bodies = [json.dumps(say(stream=True)).encode()] if sends else []

        async def receive() -> Any:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await never.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body" and sends:
                await never.wait()

        await asyncio.wait_for(rig.app(raw_scope("/v1/chat/completions"), receive, send), 30)

        assert sent[0]["status"] == (200 if sends else 504)
        assert (rig.omni._admission.in_flight, rig.omni._admission.num_preparing) == (0, 0)


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
