"""A real server under test: its processes, its health, its clients, and what was measured."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load_client import LoadClient, Outcome, connected
from tests.dfx.reliability.processes import replica_pids, send

NOTICED_S: Final = 0.5
"""From a death to the error at the client and to 503."""
RECOVERY_S: Final = float(os.environ.get("VLLM_OMNI_RELIABILITY_RECOVERY_S", "90"))
"""Bound on the wait for a restart: what ends a test whose replica never comes."""
BACKOFF_S: Final = float(os.environ.get("VLLM_OMNI_RELIABILITY_BACKOFF_S", "0.5"))
"""`restart_backoff_s` of every stage."""
STALL_S: Final = float(os.environ.get("VLLM_OMNI_RELIABILITY_STALL_S", "5"))
"""`stall_timeout_s` of every stage."""

FIGURES: Final[list[tuple[str, str]]] = []
"""What was measured, for the summary at the end."""


def note(what: str, value: str) -> None:
    FIGURES.append((what, value))


async def until(
    condition: Callable[[], Awaitable[object] | object], timeout_s: float, what: str
) -> float:
    """Wait until a condition that nobody announces holds; how long it took.

    The one place that looks again and again: health and process titles of another program.
    """
    begun_s = time.monotonic()
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        waited_s = time.monotonic() - begun_s
        if result:
            return waited_s
        if waited_s > timeout_s:
            pytest.fail(f"{what}: not within {timeout_s:g} s")
        await asyncio.sleep(0.01)


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    url: str
    pid: int | None
    """Of the API process; None when it runs on another host."""
    takes_orders: bool
    """It serves `faulty_family`."""
    shm_is_small: bool
    """Its /dev/shm is its own and small."""
    deadline_s: float
    """Of every request."""
    log: Path | None = None
    temporary: Path | None = None
    """Its TMPDIR, which nobody else has."""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 80

    def replicas(self) -> dict[str, int]:
        """Process ids by replica; skips the test for a server on another host."""
        if self.pid is None:
            pytest.skip("the server's processes are not on this host")
        return replica_pids(self.pid)

    def needs_orders(self) -> None:
        if not self.takes_orders:
            pytest.skip("this fault comes from inside: the server has to serve the tests' family")


class Rig:
    """One test's view of the server. Made by `attached`."""

    def __init__(self, server: ServerUnderTest, client: LoadClient) -> None:
        self.server = server
        self.client = client

    async def health(self) -> tuple[int, Any]:
        return await self.client.get("/health")

    async def figure(self, name: str, **labels: str) -> dict[str, float]:
        """Samples of one series of `/metrics` that have these labels, by stage and replica."""
        _, text = await self.client.get("/metrics", 10.0)
        return {
            "/".join(sample.labels.get(key, "") for key in ("stage", "replica")): sample.value
            for family in text_string_to_metric_families(str(text))
            for sample in family.samples
            if sample.name == f"vllm_omni_{name}" and labels.items() <= sample.labels.items()
        }

    def replicas_of(self, stage: str) -> list[str]:
        """`voice/0` and so on."""
        return sorted(name for name in self.server.replicas() if name.startswith(f"{stage}/"))

    async def is_whole(self) -> bool:
        """Every replica serves."""
        status, _ = await self.health()
        return status == 200 and all((await self.figure("replica_state", state="ready")).values())

    async def is_idle(self) -> bool:
        """No stage has a request."""
        return not any((await self.figure("requests_in_flight")).values())

    async def kill(self, replica: str) -> float:
        """SIGKILL a replica; the moment."""
        return send(self.server.replicas()[replica], signal.SIGKILL)

    def kill_all(self, stage: str) -> float:
        """SIGKILL every replica of a stage, before the first one is back; the last moment."""
        replicas = self.server.replicas()
        killed = [name for name in replicas if name.startswith(f"{stage}/")]
        return [send(replicas[name], signal.SIGKILL) for name in killed][-1]

    @asynccontextmanager
    async def frozen(self, replica: str) -> AsyncIterator[int]:
        """A replica that is stopped, and goes on afterwards whatever happens."""
        pid = self.server.replicas()[replica]
        send(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                send(pid, signal.SIGCONT)

    async def until_whole(self) -> float:
        """Wait until every replica serves (again); how long it took."""
        return await until(self.is_whole, RECOVERY_S, "every replica serves")

    async def last_errors(self, stage: str) -> str:
        """What the replicas of a stage died of the last time."""
        _, health = await self.health()
        return " ".join(str(one["last_error"]) for one in health["replicas"][stage])

    async def num_restarts(self, replica: str) -> float:
        """How often a replica has come back."""
        return (await self.figure("replica_restarts_total"))[replica]

    async def comes_back(self, replica: str, num_restarts: float) -> float:
        """Wait until a replica that had come back so often has done so once more; the moment."""

        async def is_back() -> bool:
            return await self.num_restarts(replica) > num_restarts

        await until(is_back, RECOVERY_S, f"{replica} serves again")
        return time.monotonic()

    async def assert_in_time(self, replica: str, took_s: float, late: Lateness) -> None:
        """A replica came back within its back-off and what its start itself took."""
        start_s = (await self.figure("replica_start_seconds"))[replica]
        note(
            f"SIGKILL of {replica}: it serves after",
            f"{took_s:.1f} s (back-off {BACKOFF_S:g} s, its start {start_s:.1f} s){late}",
        )
        assert took_s < BACKOFF_S + start_s + NOTICED_S + late.allowance_s


@asynccontextmanager
async def attached(server: ServerUnderTest) -> AsyncIterator[Rig]:
    """A rig; afterwards nothing of the test runs and no request outlived its deadline."""
    async with connected(server.url, timeout_s=2 * server.deadline_s) as client:
        rig = Rig(server, client)
        yield rig
        await until(lambda: client.num_open == 0, 2 * server.deadline_s, "all requests ended")


@asynccontextmanager
async def running(
    *requests: Coroutine[Any, Any, Outcome],
) -> AsyncIterator[list[asyncio.Task[Outcome]]]:
    """Requests in the background; cancelled at the end unless they are done."""
    tasks = [asyncio.create_task(request) for request in requests]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def under_way(client: LoadClient, outcomes: Sequence[Outcome], count: int = 3) -> None:
    """Wait until each of these requests has received this many more chunks, or ended."""
    wanted = {id(one): len(one.chunk_times_s) + count for one in outcomes}
    await got_so_far(client, outcomes, lambda one: len(one.chunk_times_s) >= wanted[id(one)])


async def got_so_far(
    client: LoadClient, outcomes: Sequence[Outcome], is_so_far: Callable[[Outcome], bool]
) -> None:
    """Wait until this holds for each of these requests, or it has ended."""
    async with asyncio.timeout(60):
        while any(not is_so_far(one) and not one.ended_s for one in outcomes):
            client.on_chunk.clear()
            await client.on_chunk.wait()
    ended = [str(one) for one in outcomes if one.ended_s]
    assert not ended, f"ended before the fault: {ended}"


class Lateness:
    """How late this process itself was woken: what a busy machine adds to every figure.

    On a quiet machine this is a few milliseconds.
    """

    _INTERVAL_S: Final = 0.005
    _WAKE_UPS: Final = 4
    """From a step to its client: replica, orchestrator, API loop, client."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.worst_s = 0.0
        self._due_s = 0.0
        self._handle: asyncio.TimerHandle | None = None

    @property
    def allowance_s(self) -> float:
        """What to add to a bound."""
        return self._WAKE_UPS * self.worst_s

    def __str__(self) -> str:
        return f" (this process up to {self.worst_s * 1000:.0f} ms late)"

    def __enter__(self) -> Lateness:
        self._plan()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _plan(self) -> None:
        self._due_s = self._loop.time() + self._INTERVAL_S
        self._handle = self._loop.call_at(self._due_s, self._ring)

    def _ring(self) -> None:
        self.worst_s = max(self.worst_s, self._loop.time() - self._due_s)
        self._plan()


def rate(streams: Sequence[Outcome], from_s: float, to_s: float) -> float:
    """Chunks per second, of all together."""
    return sum(one.chunks_between(from_s, to_s) for one in streams) / (to_s - from_s)


def load_average() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def assert_ended_in_time(outcomes: Sequence[Outcome], deadline_s: float) -> None:
    """No request is older than its deadline, ever; a second for the way back."""
    late = [str(one) for one in outcomes if one.duration_s > deadline_s + 1.0]
    assert not late, f"older than the deadline of {deadline_s:g} s: {late}"


def _looks_like_server_unreachable(error: BaseException) -> bool:
    """Whether an error says that nobody listens any more."""
    kinds = (aiohttp.ClientConnectionError, ConnectionError, asyncio.IncompleteReadError)
    return isinstance(error, kinds) and not isinstance(error, TimeoutError)


async def _assert_server_alive_after_fault(host: str, port: int, *, scenario: str) -> None:
    """For 15 seconds the server answers /health, with 200 or 503."""
    timeout = aiohttp.ClientTimeout(total=5.0)
    answers = 0
    async with aiohttp.ClientSession(f"http://{host}:{port}", timeout=timeout) as session:
        until_s = time.monotonic() + 15.0
        while time.monotonic() < until_s:
            try:
                async with session.get("/health") as response:
                    status = response.status
            except Exception as error:
                if _looks_like_server_unreachable(error):
                    pytest.fail(f"{scenario}: the server exited ({error!r})")
                raise
            assert status in (200, 503), f"{scenario}: /health answered {status}"
            answers += 1
            await asyncio.sleep(0.5)
    assert answers, f"{scenario}: /health never answered"
