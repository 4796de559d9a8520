"""Where the first sound of a spoken chat waits: when a request passes each place on its way.

    first_audio.py MODEL [-c 1,8,32] [--load 100:20:8] [--rounds 3] [-- arguments of vllm serve]

Starts a server with a probe in each of its processes. All clients of a level ask at one moment, and
the next round begins when everything is answered. Places are in the order of their median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.request_probe import FOLDER, read_notes
from benchmarks.served import own_and_served, serve
from benchmarks.spoken_chat import Load, ask

_ROOT: Final = Path(__file__).resolve().parents[1]

Notes = dict[str, dict[str, float]]
"""By request and place: milliseconds of the monotonic clock."""
STEPS: Final = ("thinker: begun", "talker: begun", "code2wav: begun")
_PROBE_WRITES_S: Final = 0.5
"""Until all that was noted is in the files."""
_SENT: Final = "sent"


async def round_of(url: str, model: str, load: Load, num_clients: int, prefix: str) -> Notes:
    """All clients ask at once; what they saw."""
    seen: Notes = {}

    async def client(session: aiohttp.ClientSession, index: int) -> None:
        name = f"{prefix}.{index}"
        began_ms = time.monotonic() * 1e3
        answer = await ask(session, url, load.body(model, index), {"X-Request-Id": name})
        seen[name] = {_SENT: began_ms}
        if answer.first_text_s is not None:
            seen[name]["client: text"] = began_ms + 1e3 * answer.first_text_s
        if answer.chunks:
            seen[name]["client: audio"] = began_ms + 1e3 * answer.chunks[0][0]

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=1 << 20
    ) as session:
        await asyncio.gather(*(client(session, index) for index in range(num_clients)))
    return seen


def report(num_clients: int, rounds: Sequence[Notes]) -> dict[str, object]:
    """One level: medians of all requests, and the steps among which each round's fell."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for places in (places for one in rounds for places in one.values()):
        for place in places.keys() - {_SENT}:
            times[place].append(places[place] - places[_SENT])
    medians = {place: statistics.median(values) for place, values in times.items()}
    ordered = dict(sorted(medians.items(), key=lambda item: item[1]))
    print(f"\n{num_clients} at once: milliseconds after the request was sent, median (range)")
    before = 0.0
    for place, at in ordered.items():
        low, high = min(times[place]), max(times[place])
        print(f"  {place:24} {at:8.1f}  +{at - before:6.1f}   ({low:.1f} to {high:.1f})")
        before = at
    steps = {place: [steps_of(one, place) for one in rounds] for place in STEPS if place in times}
    for place, each in steps.items():
        print(f"  {place}, requests in each step, by round: {each}")
    return {"clients": num_clients, "median_ms": ordered, "steps": steps}


def steps_of(notes: Notes, place: str) -> list[int]:
    """How many requests began in each step: those of one step were noted at one moment."""
    moments = Counter(places[place] for places in notes.values() if place in places)
    return [num for _, num in sorted(moments.items())]


def write_plugin(folder: Path) -> Path:
    """A folder for PYTHONPATH in which the probe is a plugin of vLLM's."""
    info = folder / "benchmark_request_probe-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: benchmark-request-probe\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nrequest_probe = benchmarks.request_probe:install\n"
    )
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        epilog="behind `--`: arguments of `vllm serve`",
        description="Where the first sound of a chat waits.",
    )
    parser.add_argument("model")
    parser.add_argument("--load", type=Load.parse, default=Load(100, 20, 8))
    parser.add_argument("-c", "--clients", default="1,8,32", help="at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    own, served = own_and_served(sys.argv[1:])
    arguments = parser.parse_args(own)
    levels = [int(level) for level in arguments.clients.split(",")]
    seen: dict[int, list[Notes]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        notes = Path(scratch) / "notes"
        notes.mkdir()
        plugin = write_plugin(Path(scratch) / "plugin")
        env = {
            FOLDER: str(notes),
            "PYTHONPATH": os.pathsep.join([str(plugin), str(_ROOT)]),
        }
        log = Path(scratch) / "server.log"
        with serve(Path(arguments.model), log, served, env=env, timeout_s=900) as server:
            for level in levels:
                seen[level] = [
                    asyncio.run(
                        round_of(
                            server.url,
                            arguments.model,
                            arguments.load,
                            level,
                            f"probe.{level}.{number}",
                        )
                    )
                    for number in range(arguments.rounds + 1)
                ]
            time.sleep(_PROBE_WRITES_S)
        for now_ns, place, name in read_notes(notes):
            for notes_of_round in (one for rounds in seen.values() for one in rounds):
                if name in notes_of_round:
                    notes_of_round[name][place] = now_ns / 1e6
    rows = [report(level, rounds[1:]) for level, rounds in seen.items()]  # the first one warms up
    if arguments.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
