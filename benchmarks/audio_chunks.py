"""What the server adds to a chunk of audio: from the vocoder that has it to the client that has it.

The vocoder is one that stamps its chunks with the time; everything behind it is the real thing:
replica, orchestrator, API process, HTTP, to the last byte of the event at a client that reads a
socket. A bare uvicorn that writes the same events ready-made is measured by the same client in the
same run: so much is HTTP itself, and the machine. Hand-over between two stages, the other share of
a chunk's way, is in `connectors`.

    .venv/bin/python benchmarks/audio_chunks.py [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Final

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bare_events import bare_server
from benchmarks.event_client import listen
from benchmarks.served import serve
from benchmarks.stamped_voice import STEP_S, write_model, write_plugin

_ROOT: Final = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="What the server adds to a chunk of audio.")
    parser.add_argument("--chunks", type=int, default=200, help="chunks of each request")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8], help="at once")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, bare_server(STEP_S) as bare_url:
        plugin = write_plugin(Path(folder) / "plugin")
        with serve(
            write_model(Path(folder) / "model"),
            Path(folder) / "server.log",
            ["--max-speech-chars", "20000"],
            env={"PYTHONPATH": os.pathsep.join([str(plugin), str(_ROOT)])},
        ) as server:
            for url in (server.url, bare_url):
                uvloop.run(measure(url, 1, 10))
            for num_clients in arguments.clients:
                ours = uvloop.run(measure(server.url, num_clients, arguments.chunks))
                bare = uvloop.run(measure(bare_url, num_clients, arguments.chunks))
                rows.append(_row(num_clients, arguments.chunks, ours, bare))
    if arguments.json:
        print(json.dumps({"audio_chunks": rows}))
    return 0


def _row(
    num_clients: int, num_chunks: int, added_ms: list[float], bare_ms: list[float]
) -> dict[str, float]:
    ours, bare = statistics.median(added_ms), statistics.median(bare_ms)
    row = {
        "clients": num_clients,
        "added_ms_p50": round(ours, 3),
        "added_ms_p99": round(statistics.quantiles(added_ms, n=100)[98], 3),
        "bare_ms_p50": round(bare, 3),
        "ratio": round(ours / bare, 1),
        "joined": num_clients * num_chunks - len(added_ms),
    }
    print(
        "{clients} at once: {added_ms_p50} ms a chunk (p50), {added_ms_p99} ms (p99), {ratio} of "
        "the {bare_ms_p50} ms that a bare uvicorn needs for the same bytes; {joined} chunks were "
        "sent together with the one before".format(**row)
    )
    return row


async def measure(url: str, num_clients: int, num_chunks: int) -> list[float]:
    """Milliseconds for each chunk that a client received."""
    answers = [listen(url, num_chunks) for _ in range(num_clients)]
    return [added for one in await asyncio.gather(*answers) for added in one]


if __name__ == "__main__":
    sys.exit(main())
