"""A long run of mixed requests, clients that leave, and replicas that are killed.

    python benchmarks/soak.py --minutes 10 [--json]

First 500 requests whose clients leave at 10 %, with nothing else: what stays behind of each. Then
the minutes: text, speech, spoken chats and recordings from several clients at once, some of whom
leave, while replicas are killed one after the other. A tiny checkpoint on loopback unless
`--model` names another; every process it starts is gone at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.load_client import SENTENCE, LoadClient, Outcome, connected, heard, recording
from benchmarks.process_watch import (
    ProcessWatch,
    file_growth,
    later_half,
    named_processes,
    rss_slope,
)
from benchmarks.served import Server, ServerError, serve

MAX_ABORT_BYTES: Final = 20_000
"""Growth of a process that one abort may cost."""
MAX_FILE_GROWTH: Final = 8
MAX_SHARED_GROWTH: Final = 1 << 20
_WARM_UP_ABORTS: Final = 150
_READY: Final = re.compile(
    r'vllm_omni_replica_state\{replica="(?P<replica>\d+)",stage="(?P<stage>[^"]+)",'
    r'state="ready"\} (?P<value>\S+)'
)
_TEXT: Final = "Tell me a story about a clock."
_LATE_S: Final = 2.0
"""For the way back of an answer on a busy machine."""


@dataclass(slots=True)
class Tally:
    """What became of all requests."""

    deadline_s: float
    codes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    num_left: int = 0
    hung: list[str] = field(default_factory=list)
    num_kills: int = 0
    recovery_s: list[float] = field(default_factory=list)

    def take(self, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        if outcome.duration_s > self.deadline_s + _LATE_S:
            self.hung.append(str(outcome))
        if outcome.left:
            self.num_left += 1
        elif not outcome.succeeded:
            self.codes[outcome.code or "connection"] += 1

    @property
    def error_rate(self) -> float:
        return sum(self.codes.values()) / max(1, self.kinds.total() - self.num_left)


class Requests:
    """Requests of every kind, in an order that only the seed decides."""

    def __init__(self, client: LoadClient, seed: int) -> None:
        self._client = client
        self._random = random.Random(seed)
        self._recording = recording(1.0)

    def next(self, *, leaves: bool = False) -> Coroutine[Any, Any, Outcome]:
        client, pick = self._client, self._random.random()
        leave_after = 4 if leaves or self._random.random() < 0.15 else 0
        if pick < 0.35:
            return client.speech(SENTENCE * 40, leave_after=min(leave_after, 1))
        if pick < 0.6:
            return client.chat(_TEXT, max_tokens=40, leave_after=leave_after)
        if pick < 0.85 or leaves:
            return client.chat(_TEXT, max_tokens=40, audio=True, leave_after=leave_after)
        if pick < 0.93:
            return client.chat(heard(self._recording), max_tokens=20)
        return client.transcribe(self._recording, max_tokens=60)


async def abort_many(server: Server, client: LoadClient, count: int, clients: int) -> ProcessWatch:
    """Requests whose clients leave; samples along their number, after a warm-up."""
    requests, watch = Requests(client, seed=1), ProcessWatch(server.process.pid)
    for done in range(0, _WARM_UP_ABORTS + count, clients):
        await asyncio.gather(*(requests.next(leaves=True) for _ in range(clients)))
        if done >= _WARM_UP_ABORTS:
            watch.sample(done)
    return watch


async def mixed(
    server: Server, client: LoadClient, arguments: argparse.Namespace, tally: Tally
) -> ProcessWatch:
    """The minutes."""
    watch = ProcessWatch(server.process.pid)
    end_s = time.monotonic() + arguments.minutes * 60

    async def ask(seed: int) -> None:
        requests = Requests(client, seed)
        while time.monotonic() < end_s:
            tally.take(await requests.next())

    asking = asyncio.gather(*(ask(seed) for seed in range(arguments.clients)))
    beside = [
        asyncio.create_task(_sample(watch, client)),
        asyncio.create_task(_kill_in_turn(server, client, arguments, tally)),
    ]
    try:
        await asyncio.wait({asking, *beside}, return_when=asyncio.FIRST_COMPLETED)
        for task in beside:
            if task.done():
                task.result()  # they go on for ever: it raises
        await asking
    finally:
        for future in (asking, *beside):
            future.cancel()
        await asyncio.gather(asking, *beside, return_exceptions=True)
    return watch


async def _sample(watch: ProcessWatch, client: LoadClient) -> None:
    while True:
        states = await _replica_states(client)
        watch.sample(time.monotonic(), {name for name, is_ready in states.items() if is_ready})
        await asyncio.sleep(1.0)


async def _kill_in_turn(
    server: Server, client: LoadClient, arguments: argparse.Namespace, tally: Tally
) -> None:
    """Kill one replica after the other; the next when all serve again."""
    for turn in range(sys.maxsize):
        await asyncio.sleep(arguments.kill_every)
        replicas = named_processes(server.process.pid)[1:]
        name, pid = replicas[turn % len(replicas)]
        begun_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        tally.num_kills += 1
        while not await _is_back(client, server, pid):
            if time.monotonic() - begun_s > arguments.recovery:
                raise ServerError(f"{name} did not come back within {arguments.recovery:g} s")
            await asyncio.sleep(0.1)
        tally.recovery_s.append(time.monotonic() - begun_s)


async def _is_back(client: LoadClient, server: Server, old_pid: int) -> bool:
    """The killed process is gone and every replica serves."""
    if any(pid == old_pid for _, pid in named_processes(server.process.pid)):
        return False
    return all((await _replica_states(client)).values())


async def _replica_states(client: LoadClient) -> dict[str, bool]:
    """Which replicas are ready, by `/metrics`."""
    _, text = await client.get("/metrics", 30.0)
    found = (_READY.match(line) for line in str(text).splitlines())
    return {f"{one['stage']}/{one['replica']}": one["value"] == "1.0" for one in found if one}


def report(
    aborts: ProcessWatch, minutes: ProcessWatch, tally: Tally, num_open: int
) -> dict[str, object]:
    """All figures, by name."""
    while_aborting, while_mixed = aborts.longest(), minutes.longest()
    return {
        "requests": tally.kinds.total(),
        "requests_by_kind": dict(sorted(tally.kinds.items())),
        "left": tally.num_left,
        "hung": len(tally.hung) + num_open,
        "error_rate": round(tally.error_rate, 4),
        "errors_by_code": dict(sorted(tally.codes.items())),
        "kills": tally.num_kills,
        "slowest_recovery_s": round(max(tally.recovery_s, default=0.0), 1),
        "abort_rss_bytes": {name: round(rss_slope(s)) for name, s in while_aborting.items()},
        "abort_file_growth": {name: file_growth(s) for name, s in while_aborting.items()},
        "abort_shm_growth_bytes": aborts.shared_growth_bytes(),
        "rss_bytes": {name: s[-1].rss_bytes for name, s in while_mixed.items()},
        "rss_bytes_per_minute": {name: round(60 * rss_slope(s)) for name, s in while_mixed.items()},
        "rss_bytes_per_minute_later": {
            name: round(60 * rss_slope(later_half(s))) for name, s in while_mixed.items()
        },
        "open_files": {name: s[-1].num_files for name, s in while_mixed.items()},
        # A process that was started in these minutes had nobody to talk to at first.
        "file_growth": {name: file_growth(later_half(s)) for name, s in while_mixed.items()},
        "shm_growth_bytes": minutes.shared_growth_bytes(),
    }


def broken_promises(figures: dict[str, Any]) -> list[str]:
    """What a run must not show."""
    broken = [f"{figures['hung']} requests hung"] if figures["hung"] else []
    for name, slope in figures["abort_rss_bytes"].items():
        if slope > MAX_ABORT_BYTES:
            broken.append(f"{name} grows by {slope} bytes per abort, at most {MAX_ABORT_BYTES}")
    for key in ("abort_file_growth", "file_growth"):
        for name, growth in figures[key].items():
            if growth > MAX_FILE_GROWTH:
                broken.append(f"{name} has {growth} more open files ({key})")
    broken += [
        f"/dev/shm grew by {figures[key]} bytes ({key})"
        for key in ("abort_shm_growth_bytes", "shm_growth_bytes")
        if figures[key] > MAX_SHARED_GROWTH
    ]
    return broken


async def run(server: Server, arguments: argparse.Namespace) -> dict[str, object]:
    tally = Tally(arguments.deadline)
    async with connected(server.url, timeout_s=3 * arguments.deadline) as client:
        print(f"{arguments.aborts} aborts", file=sys.stderr)
        aborts = await abort_many(server, client, arguments.aborts, arguments.clients)
        print(f"{arguments.minutes:g} minutes of requests and kills", file=sys.stderr)
        minutes = await mixed(server, client, arguments, tally)
        figures = report(aborts, minutes, tally, client.num_open)
    figures["load_average"] = round(os.getloadavg()[0], 1)
    for outcome in tally.hung[:5]:
        print(f"hung: {outcome}", file=sys.stderr)
    return figures


def show(figures: dict[str, object]) -> None:
    for name, value in figures.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{name.replace('_', ' '):<28}{text}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--aborts", type=int, default=500)
    parser.add_argument("--clients", type=int, default=6, help="requests at once")
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds; 0: no kills")
    parser.add_argument("--recovery", type=float, default=120.0, help="bound on a restart, seconds")
    parser.add_argument("--deadline", type=float, default=30.0, help="of each request, seconds")
    parser.add_argument("--model", type=Path, help="checkpoint; a tiny one is made otherwise")
    parser.add_argument("--json", action="store_true", help="one line of JSON, last")
    arguments = parser.parse_args()
    arguments.kill_every = arguments.kill_every or float("inf")
    return arguments


def main() -> int:
    arguments = parse()
    options = ["--request-timeout", f"{arguments.deadline:g}"]
    for setting in (
        "voice.num_replicas=2",
        *(f"{stage}.max_restarts=100000" for stage in ("asr", "thinker", "voice")),
        *(f"{stage}.max_restart_backoff_s=2" for stage in ("asr", "thinker", "voice")),
    ):
        options += ["--stage", setting]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            model = arguments.model or make_model(folder / "model")
            with serve(model, folder / "server.log", options) as server:
                figures = asyncio.run(run(server, arguments))
        except ServerError as error:
            print(f"soak: error: {error}", file=sys.stderr)
            return 1
    broken = broken_promises(figures)
    show(figures)
    for promise in broken:
        print(f"broken: {promise}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({**figures, "broken": broken}))
    return 1 if broken else 0


def make_model(folder: Path) -> Path:
    from vllm_omni.model_executor.models.smol_voice.tiny import make_tiny

    return make_tiny(folder)


if __name__ == "__main__":
    sys.exit(main())
