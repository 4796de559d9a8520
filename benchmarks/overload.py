"""How long a refusal takes while a server is full, and what the refused cost it.

    python benchmarks/overload.py [--model DIR] [--burst 100] [--seconds 60] [--json]

The server takes 4 requests. Two bursts of requests with long recordings come at once: one to the
idle server, which takes the 4 that arrive first, and one while 4 long answers are being written,
which must all be refused before anything is read or decoded. Each client measures from its last
byte sent to the answer's first; a body that the server does not wait for is sent all the same, so
the times contain what the client itself needs for the bodies of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.load_client import recording
from benchmarks.served import ServerError, serve

MAX_IN_FLIGHT: Final = 4


async def post(host: str, port: int, body: bytes) -> tuple[int, float]:
    """Status, and milliseconds from the last byte sent to the first byte of the answer."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(post_head(body))
        writer.write(body)
        with suppress(ConnectionError):
            await writer.drain()
        sent_s = time.perf_counter()
        line = await reader.readline()
        return int(line.split()[1]), (time.perf_counter() - sent_s) * 1000
    finally:
        writer.close()


def post_head(body: bytes) -> bytes:
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: omni\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()


@asynccontextmanager
async def full(port: int) -> AsyncIterator[None]:
    """Every place of the server is taken by an answer that is still being written."""
    message = {"role": "user", "content": "Count as far as you can."}
    length = {"max_tokens": 600, "ignore_eos": True}
    body = json.dumps({"messages": [message], "stream": True, **length}).encode()
    async with AsyncExitStack() as stack:
        readers = []
        for _ in range(MAX_IN_FLIGHT):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(post_head(body) + body)
            readers.append(reader)
        for reader in readers:
            if b" 200 " not in (head := await reader.readuntil(b"\r\n\r\n")):
                raise ServerError(f"the server could not be filled: {head.decode()}")
            await reader.readuntil(b"data: ")
        yield


async def bursts(port: int, num: int, body: bytes) -> dict[str, Any]:
    idle = await burst(port, num, body)
    async with full(port):
        busy = await burst(port, num, body)
    return {"body_mib": round(len(body) / 2**20, 2), "idle": idle, "full": busy}


async def burst(port: int, num: int, body: bytes) -> dict[str, Any]:
    answers = await asyncio.gather(*(post("127.0.0.1", port, body) for _ in range(num)))
    refused = sorted(took_ms for status, took_ms in answers if status == 503)
    return {
        "statuses": dict(Counter(status for status, _ in answers)),
        "refusal_ms_p50": round(statistics.median(refused), 2) if refused else None,
        "refusal_ms_max": round(refused[-1], 2) if refused else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(".demo/smol_voice"))
    parser.add_argument("--burst", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each recording")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    part = {"data": base64.b64encode(recording(options.seconds)).decode(), "format": "wav"}
    content = [{"type": "input_audio", "input_audio": part}]
    request = {"messages": [{"role": "user", "content": content}], "max_tokens": 8}
    body = json.dumps(request).encode()
    flags = ["--max-in-flight", str(MAX_IN_FLIGHT)]
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            serve(options.model, Path(folder) / "server.log", flags) as server,
        ):
            port = int(server.url.rpartition(":")[2])
            figures = asyncio.run(bursts(port, options.burst, body))
    except ServerError as error:
        print(f"overload: {error}", file=sys.stderr)
        return 1
    for name, value in figures.items():
        print(f"{name:<16} {value}")
    if options.json:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
