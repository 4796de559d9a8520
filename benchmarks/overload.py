"""How long a refusal takes while a server is full, and what the refused cost it.

    python benchmarks/overload.py [--model DIR] [--burst 100] [--seconds 60] [--json]

The server takes 4 requests. A burst of requests with long recordings comes at once: those beyond
the bound must be refused before anything is parsed or decoded. Each client measures from its last
byte sent to the answer's first; a body that the server does not wait for is sent all the same.
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
from contextlib import suppress
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
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: omni\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        with suppress(ConnectionError):
            await writer.drain()
        sent_s = time.perf_counter()
        line = await reader.readline()
        return int(line.split()[1]), (time.perf_counter() - sent_s) * 1000
    finally:
        writer.close()


async def burst(port: int, num: int, body: bytes) -> dict[str, Any]:
    answers = await asyncio.gather(*(post("127.0.0.1", port, body) for _ in range(num)))
    refused = sorted(took_ms for status, took_ms in answers if status == 503)
    return {
        "statuses": dict(Counter(status for status, _ in answers)),
        "body_mib": round(len(body) / 2**20, 2),
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
            figures = asyncio.run(burst(port, options.burst, body))
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
