"""The orchestrator's side of a replica of our own engines: starts its process, speaks with it.

What they say to each other is each engine's own; how it travels is here. Outputs arrive as socket
events in the orchestrator's loop; the death of the process is one more event, which wakes everyone
who waits for it. What is big stays where the socket put it: it is not copied in the loop.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import msgspec
import zmq

from vllm_omni.config.pipeline import StageKind
from vllm_omni.distributed.run_directory import RunDirectory
from vllm_omni.engine.messages import StageFailure, StageOutput, StageRequest
from vllm_omni.engine.process_child import ChildMain
from vllm_omni.engine.process_shell import ReplicaProcess
from vllm_omni.engine.process_status import Heartbeat, ProcessExit
from vllm_omni.engine.replica_death import ReplicaDeadError
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.errors import (
    BadRequestError,
    DeadlineExceededError,
    OverloadedError,
    error_from_code,
)
from vllm_omni.generation import wire
from vllm_omni.generation.replica_loop import CALL_TIMEOUT_S, MAX_QUEUED_MESSAGES
from vllm_omni.generation.report_stream import BrokenReportsError, ReportReader

logger = logging.getLogger(__name__)

MAX_UNREAD_OUTPUTS = 4096
"""Outputs kept for a slow reader; beyond, they wait in the socket and then in the replica."""


@dataclass(frozen=True, slots=True)
class ProcessMetrics:
    """See `ReplicaMetrics`."""

    num_running: int = 0
    num_waiting: int = 0


class ProcessClient(abc.ABC):
    """See `StageClient`. Made by `start`."""

    kind: StageKind
    target: ClassVar[ChildMain]
    """What the replica's process runs."""

    def __init__(self, spec: ReplicaSpec, directory: RunDirectory) -> None:
        self.stage_id = spec.stage_id
        self.replica_id = spec.replica_id
        self.data_address: str | None = None
        self._spec = spec
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._commands.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self._reports = ReportReader(directory.socket_path("reports"))
        self._is_reading = False
        """Its socket is watched; not while there is no room for outputs, nor after its end."""
        self._process: ReplicaProcess | None = None
        self._running: set[str] = set()
        self._unsent_aborts: set[str] = set()
        """Aborts that found the command queue full; they go out with the next event."""
        self._outputs: list[StageOutput] = []
        self._changed = asyncio.Event()
        self._death: str | None = None
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[object]] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        state = f"dead: {self._death}" if self._death else f"running={len(self._running)}"
        return f"<{type(self).__name__} {self._spec.name} {state}>"

    @classmethod
    async def start(cls, spec: ReplicaSpec) -> Self:
        """Start the replica's process and wait until it has passed its self-test.

        Raises:
            StageStartError: the replica's own error on one line.
        """
        client = cls(spec, RunDirectory.create(spec.incarnation_name))
        try:
            await client._start()
        except BaseException:
            await client.shutdown_async(0.0)
            raise
        return client

    async def _start(self) -> None:
        addresses = {
            "command_address": self._directory.ipc("commands"),
            "report_path": self._directory.socket_path("reports"),
            "data_address": self._directory.ipc("data"),
        }
        self._process = ReplicaProcess.spawn(self._target(), self._spec, addresses)
        await self._process.wait_ready()
        self.data_address = self._process.info["data_address"]
        self._commands.connect(addresses["command_address"])
        self._reports.accept()
        self._watch_reports()
        self._process.died.add_done_callback(self._on_death)

    def _target(self) -> ChildMain:
        return type(self).target

    async def add_request_async(self, request: StageRequest) -> None:
        self.check_health()
        if request.request_id in self._running:
            raise BadRequestError(f"request {request.request_id!r} is running already")
        try:
            packed = self._pack(request)
        except OverflowError:
            raise BadRequestError("the request has a number that is out of range") from None
        self._send(packed)
        self._running.add(request.request_id)

    async def update_request_async(self, request: StageRequest) -> None:
        self.check_health()
        raise BadRequestError(f"stage {self._spec.stage} takes no further input once it runs")

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        aborted = self._running.intersection(request_ids)
        if not aborted or self._death is not None:
            return
        self._running -= aborted
        self._outputs = [o for o in self._outputs if o.request_id not in aborted]
        self._watch_reports()
        self._unsent_aborts |= aborted
        self._send_aborts()

    async def source_ended_async(self, request_id: str, stream: str) -> None:
        if request_id in self._running and self._death is None:
            with contextlib.suppress(OverloadedError):  # the request's deadline remains
                self._send([wire.encode(wire.SourceEnded(request_id, stream))])

    async def get_outputs_async(self) -> Sequence[StageOutput]:
        while not self._outputs:
            self.check_health()
            self._changed.clear()
            await self._changed.wait()
        outputs, self._outputs = self._outputs, []
        if not self._is_reading:
            self._read_all()  # what was left in the socket for lack of room
        return outputs

    def check_health(self) -> None:
        if self._death is not None:
            raise ReplicaDeadError(self._death)

    async def call_utility_async(self, method: str, *args: object) -> object:
        self.check_health()
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = self._loop.create_future()
        try:
            self._send([wire.encode(wire.Utility(call_id, method, list(args)))])
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await answer
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"stage {self._spec.name} did not answer {method!r} in {CALL_TIMEOUT_S:g} s"
            ) from error
        finally:
            del self._calls[call_id]

    def metrics(self) -> ProcessMetrics:
        beat = self._process.beat if self._process is not None else None
        if beat is None:
            return ProcessMetrics()
        figures = beat.figures
        return ProcessMetrics(
            int(figures.get("num_running", 0)), int(figures.get("num_waiting", 0))
        )

    def heartbeat(self) -> Heartbeat | None:
        return self._process.heartbeat() if self._process is not None else None

    async def shutdown_async(self, timeout_s: float) -> None:
        try:
            if self._process is not None:
                await self._process.stop(timeout_s)
        finally:
            self._close()

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._die(f"stage {self._spec.name} was shut down")
        self._watch_reports()
        self._reports.close()
        self._context.destroy(linger=0)
        self._directory.remove()

    @abc.abstractmethod
    def _pack(self, request: StageRequest) -> list[wire.RawFrame]:
        """The request on the wire.

        Raises:
            BadRequestError: it holds what this stage does not take.
        """

    @abc.abstractmethod
    def _unpack(self, frames: Sequence[memoryview]) -> Sequence[StageOutput] | wire.UtilityResult:
        """What the replica reports.

        Raises:
            msgspec.DecodeError: it is not readable.
            IndexError: a frame is missing.
        """

    def _send_aborts(self) -> None:
        if self._unsent_aborts:
            with contextlib.suppress(OverloadedError):
                self._send([wire.encode(wire.Abort(sorted(self._unsent_aborts)))])
                self._unsent_aborts.clear()

    def _send(self, frames: list[wire.RawFrame]) -> None:
        try:
            self._commands.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again as error:
            raise OverloadedError(f"stage {self._spec.name} does not read its commands") from error

    def _watch_reports(self) -> None:
        """Have the loop call when there are reports, if there is room for them."""
        has_room = len(self._outputs) < MAX_UNREAD_OUTPUTS
        is_reading = has_room and not (self._is_closed or self._reports.is_over)
        if is_reading == self._is_reading:
            return
        self._is_reading = is_reading
        if is_reading:
            self._loop.add_reader(self._reports.fileno(), self._on_reports)
        else:
            self._loop.remove_reader(self._reports.fileno())

    def _on_reports(self) -> None:
        self._send_aborts()
        self._read_reports()
        self._watch_reports()

    def _read_all(self) -> None:
        """Read what is there, as far as there is room."""
        while len(self._outputs) < MAX_UNREAD_OUTPUTS and self._read_reports():
            pass
        self._watch_reports()

    def _read_reports(self) -> bool:
        """Read for one turn of the loop; False: there was nothing."""
        try:
            reports = self._reports.receive()
        except BrokenReportsError as error:
            logger.error("stage %s sent %s: it is ended", self._spec.name, error)
            self._reports.is_over = True
            if self._process is not None:
                self._process.kill()
            return False
        for frames in reports or ():
            try:
                self._take(self._unpack(frames))
            except (msgspec.DecodeError, IndexError) as error:
                logger.error("stage %s sent an unreadable report: %s", self._spec.name, error)
        return reports is not None

    def _take(self, report: Sequence[StageOutput] | wire.UtilityResult) -> None:
        if isinstance(report, wire.UtilityResult):
            answer = self._calls.get(report.call_id)
            if answer is not None and not answer.done():
                _resolve(answer, report.value, report.failure)
            return
        for output in report:
            if output.request_id in self._running:  # else aborted meanwhile
                self._outputs.append(output)
                if output.finished:
                    self._running.discard(output.request_id)
        if self._outputs:
            self._changed.set()

    def _on_death(self, died: asyncio.Future[ProcessExit]) -> None:
        if not self._is_closed:
            self._read_all()  # what it said before it went
        self._die(str(died.result()))

    def _die(self, why: str) -> None:
        if self._death is None:
            self._death = why
        self._changed.set()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ReplicaDeadError(self._death))


def _resolve(answer: asyncio.Future[object], value: object, failure: StageFailure | None) -> None:
    if failure is None:
        answer.set_result(value)
    else:
        answer.set_exception(error_from_code(failure.code, failure.message, failure.field))
