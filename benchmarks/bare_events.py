"""The least that a chunk of speech over HTTP can cost: uvicorn that writes ready-made events.

No stages, no engine, no framework. All requests get a chunk at the same moment, as from one batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import socket
import time
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import uvicorn

from benchmarks.stamped_voice import CHUNK_S, SAMPLE_RATE_HZ, STAMP_BYTES


class _Ticker:
    """Makes an event now and then for all who listen."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        pcm_bytes = 2 * round(CHUNK_S * SAMPLE_RATE_HZ)
        # 9 bytes are 12 characters, so the stamp and a zero are replaced in the text.
        self._silence = b64encode(bytes(pcm_bytes - STAMP_BYTES - 1))
        self._listeners: list[asyncio.Queue[bytes]] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            moment = b64encode(time.monotonic_ns().to_bytes(STAMP_BYTES, "little") + b"\0")
            event = b"".join(
                [
                    b'data: {"type": "speech.audio.delta", "audio": "',
                    moment,
                    self._silence,
                    b'"}\n\n',
                ]
            )
            for queue in self._listeners:
                queue.put_nowait(event)

    @contextlib.contextmanager
    def listen(self) -> Iterator[asyncio.Queue[bytes]]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._listeners.append(queue)
        try:
            yield queue
        finally:
            self._listeners.remove(queue)


def _app(step_s: float) -> Any:
    ticker = _Ticker(step_s)
    tasks: list[asyncio.Task[None]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        if not tasks:
            tasks.append(asyncio.create_task(ticker.run()))
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        num_chunks = len(json.loads(body)["input"].split())
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        with ticker.listen() as queue:
            for _ in range(num_chunks):
                event = await queue.get()
                await send({"type": "http.response.body", "body": event, "more_body": True})
        end = b'data: {"type": "speech.audio.done"}\n\n'
        await send({"type": "http.response.body", "body": end, "more_body": False})

    return app


def _serve(listening: socket.socket, step_s: float) -> None:
    config = uvicorn.Config(_app(step_s), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


@contextlib.contextmanager
def bare_server(step_s: float) -> Iterator[str]:
    """Its URL; the process ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(listening, step_s), daemon=True
        )
        process.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join()
