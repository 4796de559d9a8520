"""The processes of the ranks of one replica, seen from the replica's own process.

A thread with an event loop of its own spawns and watches them as the orchestrator does its
replicas, and reads what they report. They end with that thread, however it ends: the kernel sees to
it. When one dies the replica goes with it: the others cannot go on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq

from vllm_omni.diffusion.distributed.ranks import RANK_ENV
from vllm_omni.diffusion.executor.jobs import Result
from vllm_omni.diffusion.executor.rank_wire import unpack_result
from vllm_omni.diffusion.worker.rank import run_rank
from vllm_omni.engine.process_shell import ReplicaProcess
from vllm_omni.engine.process_status import ProcessExit
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.generation.wire import RawFrame

logger = logging.getLogger(__name__)

_END_WAIT_S: Final = 0.3
"""For the end of processes that were killed; longer would keep the replica's requests waiting."""
_CAUSE_WAIT_S: Final = 0.2
"""For the death that made the others lose a rank, which may be seen after theirs."""
_LOST: Final = "RanksLostError"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the ranks can do; the same on each."""

    max_batch_size: int
    max_prepared: int


class RankProcesses:
    """See `RankLink`. `wake` is called when there is something to take."""

    def __init__(
        self,
        spec: ReplicaSpec,
        address: str,
        progress: Callable[[str], None],
        wake: Callable[[], None],
    ) -> None:
        self.num_ranks = len(spec.devices)
        self.death: str | None = None
        self._spec = spec
        self._address = address
        self._progress = progress
        self._wake = wake
        self._context = zmq.Context()
        self._orders = [self._context.socket(zmq.PUSH) for _ in spec.devices]
        for rank, socket in enumerate(self._orders):
            socket.connect(self._order_address(rank))
        self._processes: list[ReplicaProcess] = []
        self._arrived: deque[tuple[int, Result]] = deque()
        """At most one for each lane and rank."""
        self._deaths: list[ProcessExit] = []
        self._started: concurrent.futures.Future[Limits] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def __repr__(self) -> str:
        return f"<RankProcesses {self._spec.name} ranks={self.num_ranks} death={self.death}>"

    def start(self) -> Limits:
        """Start every rank and wait until each has passed its self-test.

        Raises:
            StageStartError: one did not start; its own error.
        """
        self._thread.start()
        return self._started.result()

    def send(self, rank: int, message: list[RawFrame]) -> None:
        try:
            self._orders[rank].send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:
            # It does not read: its end, or that it stands still, shows elsewhere.
            logger.error("rank %d of stage %s takes no orders", rank, self._spec.name)

    def take(self) -> Sequence[tuple[int, Result]]:
        taken = []
        while self._arrived:
            taken.append(self._arrived.popleft())
        return taken

    def figures(self) -> Mapping[str, float]:
        """The greatest of the ranks, which mostly agree."""
        figures: dict[str, float] = {"num_ranks": self.num_ranks}
        for process in self._processes:
            for name, value in process.beat.figures.items() if process.beat is not None else ():
                figures[name] = max(value, figures.get(name, value))
        return figures

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ended just now
                self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(2 * _END_WAIT_S)
        for socket in self._orders:
            socket.close(linger=0)

    def _order_address(self, rank: int) -> str:
        return f"{self._address}.{rank}"

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        results = self._context.socket(zmq.PULL)
        results.bind(f"{self._address}.out")
        self._loop.add_reader(results.fileno(), self._read, results)
        try:
            limits = await self._start()
        except BaseException as error:  # noqa: BLE001 - the start's boundary
            self._started.set_exception(error)
        else:
            self._started.set_result(limits)
            self._read(results)  # the socket tells of changes only
            await self._closing.wait()
        finally:
            self._loop.remove_reader(results.fileno())
            results.close(linger=0)
            await self._end()

    async def _start(self) -> Limits:
        for rank in range(self.num_ranks):
            self._processes.append(self._spawn(rank))
        self._processes[0].on_progress = self._progress
        try:
            async with asyncio.TaskGroup() as group:
                for process in self._processes:
                    group.create_task(process.wait_ready(), name=process.spec.name)
        except BaseExceptionGroup as failures:
            raise _cause(failures.exceptions) from None
        for process in self._processes:
            process.died.add_done_callback(self._on_death)
        return msgspec.convert(self._processes[0].info, Limits)

    def _spawn(self, rank: int) -> ReplicaProcess:
        spec = self._spec
        env = {name: value for name, value in RANK_ENV.items() if name not in os.environ}
        rank_spec = dataclasses.replace(
            spec,
            rank=rank,
            num_threads=max(1, spec.num_threads // self.num_ranks),
            env={**env, **spec.env},
        )
        kwargs = {
            "rank": rank,
            "order_address": self._order_address(rank),
            "result_address": f"{self._address}.out",
            "store": f"{self._address.removeprefix('ipc://')}.met",
        }
        return ReplicaProcess.spawn(run_rank, rank_spec, kwargs)

    def _read(self, results: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = results.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                self._arrived.append(unpack_result([frame.buffer for frame in frames]))
            except (msgspec.DecodeError, ValueError) as error:
                self.death = (
                    f"a rank of stage {self._spec.name} reports what is not readable: {error}"
                )
                self._wake()
        if self._arrived:
            self._wake()

    def _on_death(self, died: asyncio.Future[ProcessExit]) -> None:
        self._deaths.append(died.result())
        if len(self._deaths) > 1:
            return
        wait_s = _CAUSE_WAIT_S if _is_lost(self._deaths[0]) else 0.0
        self._loop.call_later(wait_s, self._say_who_died)

    def _say_who_died(self) -> None:
        cause = next((one for one in self._deaths if not _is_lost(one)), self._deaths[0])
        self.death = str(cause)
        self._wake()

    async def _end(self) -> None:
        for process in self._processes:
            process.kill()
        ends = [process.died for process in self._processes]
        if ends:
            await asyncio.wait(ends, timeout=_END_WAIT_S)


def _is_lost(ended: ProcessExit) -> bool:
    """It went since it lost another rank."""
    return ended.error.startswith(_LOST)


def _cause(errors: Sequence[BaseException]) -> BaseException:
    """The error of the rank that failed first by itself."""
    return next((error for error in errors if _LOST not in str(error)), errors[0])
