"""The loop of a replica's process: commands in, reports out, and sleep in the kernel between.

Engines of our own share it. One thread reads commands, has the engine go on, sends what came of
it, and sleeps while there is nothing to do; other threads wake it. While the client does not read
its reports, the engine does not go on.
"""

from __future__ import annotations

import abc
import contextlib
import gc
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec
import zmq

from vllm_omni.engine.messages import StageFailure, StageOutput
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.errors import BadRequestError, OmniError, RequestFailedError
from vllm_omni.generation import wire
from vllm_omni.generation.report_stream import ReportTooLongError, ReportWriter
from vllm_omni.generation.request import Figures, failure_from

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
"""How long a call into the replica may take."""
MAX_QUEUED_MESSAGES: Final = 1024
"""Commands that may wait on either side before the other one stops."""


class Shell(Protocol):
    """What a replica asks of the process it runs in (`engine/process_child.py`)."""

    spec: ReplicaSpec
    figures: Callable[[], Figures]

    def ready(self, info: Mapping[str, object] | None = None) -> None: ...

    def progress(self, what: str) -> None: ...

    def on_stop(self, callback: Callable[[], None]) -> None: ...


class LoopEngine(Protocol):
    """What the loop asks of an engine. Every method but `figures` runs in the loop's thread."""

    def __len__(self) -> int:
        """Requests that are here."""

    @property
    def has_work(self) -> bool:
        """A step would do something now."""

    @property
    def next_deadline_s(self) -> float:
        """The earliest deadline on `time.monotonic`; infinity when there is none."""

    def figures(self) -> Figures:
        """For the heartbeat; called in another thread."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; nothing more is heard of them."""

    def step(self) -> Sequence[StageOutput]:
        """Go on; return all new outputs."""

    def fail_all(self, code: str, message: str) -> Sequence[StageOutput]:
        """End every request with this failure."""


class ReplicaLoop(abc.ABC):
    """The loop around an engine: sockets in, sockets out."""

    engine: LoopEngine

    def __init__(self, spec: ReplicaSpec, command_address: str, report_path: str) -> None:
        self._spec = spec
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._is_asleep = False
        self._num_turns = 0
        self._call_began_s: float | None = None
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._commands.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._commands.bind(command_address)
        self._reports = ReportWriter(report_path, self.wake)
        """While it is full, no forward runs."""
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def figures(self) -> Figures:
        """For the heartbeat, called in its thread: the engine's, and whether the loop turns."""
        began_s = self._call_began_s
        if began_s is not None:  # a call has a time-out of its own: nothing is expected before it
            is_at_work = time.monotonic() - began_s > CALL_TIMEOUT_S
        else:
            is_at_work = not self._is_asleep or (self.engine.has_work and not self._reports.is_full)
        return {
            **self.engine.figures(),
            "progress": self._num_turns,
            "num_runnable": max(1, len(self.engine)) if is_at_work else 0,
        }

    def wake(self) -> None:
        """Have the loop look again; from any thread."""
        with contextlib.suppress(BlockingIOError):  # full: it is about to look anyway
            os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Leave after the running forward; from any thread."""
        self._stopping = True
        self.wake()

    def close(self) -> None:
        """Give the sockets back; what was reported has a moment to leave."""
        # The wake-up's descriptor stays: a signal or a frame may still want it.
        self._reports.close()
        self._context.destroy(linger=0)

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._stopping:
            self._is_asleep = True
            self._wait()
            self._is_asleep = False
            self._num_turns += 1
            self._read_commands()
            if not self._reports.is_full:
                self._report(self.engine.step())
        stopped = self.engine.fail_all("replica_died", f"stage {self._spec.stage} was stopped")
        self._report(stopped)

    def _wait(self) -> None:
        for source, _ in self._poller.poll(self._wait_ms()):
            if source == self._wake_fd:
                os.eventfd_read(self._wake_fd)

    def _wait_ms(self) -> int | None:
        """How long nothing can happen by itself; None: for ever."""
        if self._reports.is_full:
            return None
        if self.engine.has_work:
            return 0
        deadline_s = self.engine.next_deadline_s
        if deadline_s == math.inf:
            return None
        return max(0, round((deadline_s - time.monotonic()) * 1000) + 1)

    def _read_commands(self) -> None:
        for _ in range(MAX_QUEUED_MESSAGES):
            try:
                frames = self._commands.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._obey(frames)
            except msgspec.DecodeError as error:
                logger.error("stage %s: a command is not readable: %s", self._spec.name, error)

    @abc.abstractmethod
    def _obey(self, frames: Sequence[bytes]) -> None:
        """Do what a command says.

        Raises:
            msgspec.DecodeError: it is none.
        """

    @abc.abstractmethod
    def _pack(self, outputs: Sequence[StageOutput]) -> list[wire.RawFrame]:
        """One message for all outputs."""

    def _answer(self, call: wire.Utility) -> None:
        self._call_began_s = time.monotonic()
        result = self._call(call)
        self._call_began_s = None
        self._reports.send([wire.encode(result)])

    def _refuse(self, request_id: str, message: str) -> None:
        """A request that could not be read, but for its id."""
        failure = StageFailure("invalid_request", message)
        self._report([StageOutput(request_id, finished=True, failure=failure)])

    def _call(self, call: wire.Utility) -> wire.UtilityResult:
        try:
            return wire.UtilityResult(call.call_id, self._utility(call.method, call.args))
        except OmniError as error:
            failure = StageFailure(error.code, str(error), error.field)
        except Exception as error:  # the boundary of one call
            logger.exception("stage %s: %s failed", self._spec.name, call.method)
            failure = failure_from(error, self._spec.stage)
        return wire.UtilityResult(call.call_id, failure=failure)

    def _utility(self, method: str, args: Sequence[object]) -> object:
        if method == "figures" and not args:
            return dict(self.engine.figures())
        if method == "is_sleeping" and not args:
            return False
        kind = self._spec.kind.replace("_", "-")
        raise BadRequestError(f"stage {self._spec.stage} ({kind}) has no {method!r}")

    def _report(self, outputs: Sequence[StageOutput]) -> None:
        if not outputs:
            return
        try:
            self._reports.send(self._pack(outputs))
        except ReportTooLongError as error:
            if len(outputs) > 1:
                for output in outputs:
                    self._report([output])
            else:
                self._give_up(outputs[0].request_id, str(error))

    def _give_up(self, request_id: str, message: str) -> None:
        """End a request whose result nobody can be told."""
        self.engine.abort([request_id])
        text = f"stage {self._spec.stage}: {message}"
        failure = StageFailure(RequestFailedError.code, text)
        self._report([StageOutput(request_id, finished=True, failure=failure)])


def keep_loaded() -> None:
    """What has been loaded stays: the collector of garbage need not look through it again.

    It would for a large part of a second, at any time and for every request of the replica.
    """
    gc.collect()
    gc.freeze()


def deadline_after(remaining_s: float | None) -> float:
    """On `time.monotonic`, of the time that a command says is left; infinity for none."""
    if remaining_s is None or not math.isfinite(remaining_s):
        return math.inf
    return time.monotonic() + remaining_s
