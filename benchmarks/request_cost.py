"""What spoken chats cost the API process: before the thinker has them, and until they are answered.

    request_cost.py MODEL [-c 1,8,32] [--load 100:50:50] [-- arguments of vllm serve]

Starts a server and stops its thinker (SIGSTOP) while clients ask, all at one moment: when the API
process rests, it has submitted everything. CPU time depends less on what else the machine does than
the time until it rests. MODEL may be a tiny one: what the models do is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.served import Server, own_and_served, serve
from benchmarks.spoken_chat import Load, ask

_THINKER: Final = "thinker/0"
_REST_S: Final = 0.2
"""The process rests when it has done next to nothing for so long."""
_REST_CPU_MS: Final = 1.0
_SAMPLE_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one round, for each request."""

    before_ms: float
    """CPU time until all were submitted."""
    until_rest_ms: float
    """From the first request to the last submission, all together."""
    after_ms: float
    """CPU time from then to the last byte of the answers."""


def cpu_ms(pid: int) -> float:
    """CPU time of a process, by the nanosecond."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e6


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing inside."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def rest(pid: int) -> tuple[float, float]:
    """Wait until the process rests; CPU time when it began to, within a millisecond, and when."""
    mark_ms, mark_s = cpu_ms(pid), time.perf_counter()
    while time.perf_counter() - mark_s < _REST_S:
        await asyncio.sleep(_SAMPLE_S)
        now_ms = cpu_ms(pid)
        if now_ms - mark_ms > _REST_CPU_MS:
            mark_ms, mark_s = now_ms, time.perf_counter()
    return mark_ms, mark_s


async def round_of(server: Server, model: str, load: Load, num_clients: int) -> Cost:
    """All clients ask at one moment."""
    api = server.process.pid
    thinker = next(pid for pid, title in server.processes().items() if title.endswith(_THINKER))
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=1 << 20,
    ) as session:
        await rest(api)
        with stopped(thinker):
            began_ms, began_s = cpu_ms(api), time.perf_counter()
            asking = [
                asyncio.ensure_future(ask(session, server.url, load.body(model, seed)))
                for seed in range(num_clients)
            ]
            submitted_ms, rests_s = await rest(api)
        await asyncio.gather(*asking)
        answered_ms = cpu_ms(api)
    return Cost(
        (submitted_ms - began_ms) / num_clients,
        1e3 * (rests_s - began_s),
        (answered_ms - submitted_ms) / num_clients,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        epilog="behind `--`: arguments of `vllm serve`",
        description="What chats cost the API process.",
    )
    parser.add_argument("model")
    parser.add_argument("--load", type=Load.parse, default=Load(100, 50, 50))
    parser.add_argument("-c", "--clients", default="1,8,32", help="at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    own, served = own_and_served(sys.argv[1:])
    arguments = parser.parse_args(own)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "server.log"
        words = ["--disable-uvicorn-access-log", *served]
        with serve(Path(arguments.model), log, words, timeout_s=900) as server:
            for level in map(int, arguments.clients.split(",")):
                costs = [
                    asyncio.run(round_of(server, arguments.model, arguments.load, level))
                    for _ in range(arguments.rounds + 1)
                ][1:]  # the first one warms up
                row = {"clients": level} | {
                    name: round(statistics.median(getattr(cost, name) for cost in costs), 2)
                    for name in ("before_ms", "until_rest_ms", "after_ms")
                }
                rows.append(row)
                print(
                    "{clients} at once: {before_ms} ms of CPU for each request before it is "
                    "submitted, all submitted after {until_rest_ms} ms; {after_ms} ms of CPU for "
                    "each until it is answered".format(**row),
                    flush=True,
                )
    if arguments.json:
        print(json.dumps({"request_cost": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
