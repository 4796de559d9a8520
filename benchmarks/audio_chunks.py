"""What the server adds to a chunk of audio: from the vocoder that has it to the client that has it.

The vocoder is one that stamps its chunks with the time; everything behind it is the real thing:
replica, orchestrator, API process, HTTP, a client that decodes the event. Hand-over between two
stages, the other share of a chunk's way, is in `connectors`.

    .venv/bin/python benchmarks/audio_chunks.py [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.served import serve
from benchmarks.stamped_voice import stamp, write_model, write_plugin

_ROOT: Final = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="What the server adds to a chunk of audio.")
    parser.add_argument("--chunks", type=int, default=200, help="chunks of each request")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8], help="at once")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        plugin = write_plugin(Path(folder) / "plugin")
        with serve(
            write_model(Path(folder) / "model"),
            Path(folder) / "server.log",
            ["--max-speech-chars", "20000"],
            env={"PYTHONPATH": os.pathsep.join([str(plugin), str(_ROOT)])},
        ) as server:
            asyncio.run(measure(server.url, 1, 10))
            for num_clients in arguments.clients:
                added_ms = asyncio.run(measure(server.url, num_clients, arguments.chunks))
                rows.append(_row(num_clients, arguments.chunks, added_ms))
    if arguments.json:
        print(json.dumps({"audio_chunks": rows}))
    return 0


def _row(num_clients: int, num_chunks: int, added_ms: list[float]) -> dict[str, float]:
    row = {
        "clients": num_clients,
        "added_ms_p50": round(statistics.median(added_ms), 3),
        "added_ms_p99": round(statistics.quantiles(added_ms, n=100)[98], 3),
        "joined": num_clients * num_chunks - len(added_ms),
    }
    print(
        "{clients} at once: {added_ms_p50} ms a chunk (p50), {added_ms_p99} ms (p99); "
        "{joined} chunks were sent together with the one before".format(**row)
    )
    return row


async def measure(url: str, num_clients: int, num_chunks: int) -> list[float]:
    """Milliseconds for each chunk that a client received."""
    async with aiohttp.ClientSession(url, read_bufsize=1 << 20) as session:
        requests = [_listen(session, num_chunks) for _ in range(num_clients)]
        return [added for one in await asyncio.gather(*requests) for added in one]


async def _listen(session: aiohttp.ClientSession, num_chunks: int) -> list[float]:
    body = {
        "input": "tick " * num_chunks,
        "voice": "default",
        "response_format": "pcm",
        "stream_format": "sse",
    }
    added_ms: list[float] = []
    async with session.post("/v1/audio/speech", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event["type"] == "speech.audio.delta":
                ready_ns = stamp(base64.b64decode(event["audio"]))
                added_ms.append((time.monotonic_ns() - ready_ns) / 1e6)
    return added_ms


if __name__ == "__main__":
    sys.exit(main())
