"""The process of a one-shot replica: loads the model, tests it, then serves until it is stopped.

One thread does everything: it reads commands, runs forwards, sends outputs, and sleeps in the
kernel while there is nothing to do. Only the data plane and the heartbeat have threads beside it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import zmq

from vllm_omni.distributed.omni_connectors.factory import Connector, open_connector
from vllm_omni.engine.messages import StageFailure, StageOutput
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.errors import BadRequestError, ConfigError, OmniError
from vllm_omni.generation import wire
from vllm_omni.generation.engine import OneShotEngine, load_bridge
from vllm_omni.generation.model import ModelContext, OneShotModel
from vllm_omni.generation.request import Figures, failure_from

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
"""How long a call into the replica may take."""
MAX_QUEUED_MESSAGES = 1024
"""Messages that may wait on either side before the other one stops."""


class Shell(Protocol):
    """What a replica asks of the process it runs in (`engine/process_child.py`)."""

    spec: ReplicaSpec
    figures: Callable[[], Figures]

    def ready(self, info: Mapping[str, object] | None = None) -> None: ...

    def progress(self, what: str) -> None: ...

    def on_stop(self, callback: Callable[[], None]) -> None: ...


def run_one_shot(
    shell: Shell, /, *, command_address: str, report_address: str, data_address: str
) -> None:
    """Target of a one-shot replica's process; returns when it was told to stop."""
    spec = shell.spec
    shell.progress("loading the model")
    model = load_model(spec)
    shell.progress("testing the model")
    model.self_test()
    for bridge in spec.bridges:  # so that no request waits for an import
        load_bridge(bridge)
    with contextlib.ExitStack() as stack:
        connector = None
        if spec.has_sources:
            connector = open_connector(spec.name, data_address)
            stack.callback(connector.close)
        replica = OneShotReplica(spec, model, connector, command_address, report_address)
        stack.callback(replica.close)
        shell.figures = replica.figures
        shell.on_stop(replica.stop)
        shell.ready({"data_address": connector.address if connector is not None else None})
        replica.run()


def load_model(spec: ReplicaSpec) -> OneShotModel:
    """Import the model's class and load it.

    Raises:
        ConfigError: the class is not there.
    """
    module, _, name = (spec.model_class or "").partition(":")
    try:
        model_class: type[OneShotModel] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model class {spec.model_class!r} cannot be loaded: {error}") from error
    return model_class(
        ModelContext(
            model_dir=spec.model_dir,
            device=spec.devices[0],
            num_threads=spec.num_threads,
            options=spec.engine_args,
        )
    )


class OneShotReplica:
    """The loop around the engine: sockets in, sockets out."""

    def __init__(
        self,
        spec: ReplicaSpec,
        model: OneShotModel,
        connector: Connector | None,
        command_address: str,
        report_address: str,
    ) -> None:
        self._spec = spec
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._is_asleep = False
        self._num_turns = 0
        self._call_began_s: float | None = None
        self._unsent: deque[list[wire.RawFrame]] = deque()
        """Reports that found the client's queue full. While there are some, no forward runs."""
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._commands.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._commands.bind(command_address)
        self._reports = self._context.socket(zmq.PUSH)
        self._reports.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self._reports.connect(report_address)
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self.engine = OneShotEngine(
            spec.stage,
            model,
            spec.max_batch_size,
            receiver=connector.receiver if connector is not None else None,
            clock=time.monotonic,
            wake=self.wake,
        )

    def figures(self) -> Figures:
        """For the heartbeat, called in its thread: the engine's, and whether the loop turns."""
        began_s = self._call_began_s
        if began_s is not None:  # a call has a time-out of its own: nothing is expected before it
            is_at_work = time.monotonic() - began_s > CALL_TIMEOUT_S
        else:
            is_at_work = not self._is_asleep or (self.engine.has_work and not self._unsent)
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
        # The wake-up's descriptor stays: a signal or a frame may still want it.
        self._context.destroy(linger=500)

    def run(self) -> None:
        while not self._stopping:
            self._is_asleep = True
            self._wait()
            self._is_asleep = False
            self._num_turns += 1
            self._read_commands()
            if not self._unsent:
                self._report(self.engine.step())
        stopped = self.engine.fail_all("replica_died", f"stage {self._spec.stage} was stopped")
        self._report(stopped)

    def _wait(self) -> None:
        for source, _ in self._poller.poll(self._wait_ms()):
            if source == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif source is self._reports:
                self._poller.unregister(self._reports)
                unsent, self._unsent = self._unsent, deque()
                for message in unsent:
                    self._send(message)

    def _wait_ms(self) -> int | None:
        """How long nothing can happen by itself; None: for ever."""
        if self._unsent:
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
                command = wire.decode_command(frames[0])
            except msgspec.DecodeError as error:
                logger.error("stage %s: a command is not readable: %s", self._spec.name, error)
                continue
            self._obey(command, frames)

    def _obey(self, command: wire.Command, frames: Sequence[bytes]) -> None:
        match command:
            case wire.Add():
                self._add(command, frames)
            case wire.Abort(request_ids):
                self.engine.abort(request_ids)
            case wire.SourceEnded(request_id, stream):
                self.engine.source_ended(request_id, stream)
            case wire.Utility():
                self._call_began_s = time.monotonic()
                result = self._call(command)
                self._call_began_s = None
                self._send([wire.encode(result)])

    def _add(self, add: wire.Add, frames: Sequence[bytes]) -> None:
        try:
            prompt = wire.unpack_prompt(add.prompt, frames) if add.prompt is not None else None
        except ValueError as error:
            failure = StageFailure("invalid_request", f"the prompt is not readable: {error}")
            self._report([StageOutput(add.request_id, finished=True, failure=failure)])
            return
        deadline_s = math.inf
        if add.remaining_s is not None and math.isfinite(add.remaining_s):
            deadline_s = time.monotonic() + add.remaining_s
        self.engine.add(add.request_id, prompt, add.params, add.sources, deadline_s)

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
        raise BadRequestError(f"stage {self._spec.stage} (one-shot) has no {method!r}")

    def _report(self, outputs: Sequence[StageOutput]) -> None:
        if outputs:
            self._send(wire.pack_outputs(outputs))

    def _send(self, message: list[wire.RawFrame]) -> None:
        try:
            if self._unsent:
                raise zmq.Again
            self._reports.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:
            if not self._unsent:
                self._poller.register(self._reports, zmq.POLLOUT)
            self._unsent.append(message)
