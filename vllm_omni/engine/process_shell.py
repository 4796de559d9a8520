"""The parent's side of the process shell: how every replica's process is spawned and watched.

Lives in the orchestrator's event loop. Exit and status arrive as events; nothing polls once a
replica is ready. A child dies with its parent by three independent means: the kernel's
parent-death signal, the status socket's end of file, and `stop`.

The child is a fresh interpreter, not a `multiprocessing` spawn: its environment is set before
the interpreter starts, and a user's script needs no `if __name__ == "__main__"` guard.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vllm_omni.engine.process_child import ChildMain
from vllm_omni.engine.process_status import (
    MAX_PACKET_BYTES,
    Beat,
    Failed,
    Heartbeat,
    ProcessExit,
    Progress,
    Ready,
    StatusMessage,
    decode_status,
)
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.engine.start_progress import ProgressWatch
from vllm_omni.errors import StageStartError

logger = logging.getLogger(__name__)

_BOOT = (
    "import pickle,sys;payload=open({payload},'rb');sys.path[:]=pickle.load(payload);"
    "from vllm_omni.engine.process_child import boot;boot(payload,{status},{parent})"
)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_KILL_WAIT_S = 10.0


class ReplicaProcess:
    """One replica's process. Every method must be called in the loop it was spawned in.

        process = await ReplicaProcess.start(main, spec, {"address": address})
        try:
            ...  # process.info, process.beat, process.died
        finally:
            await process.stop(timeout_s)

    `main(shell, **kwargs)` is a function at module level (see `process_child.ChildMain`).
    """

    def __init__(self, spec: ReplicaSpec, popen: subprocess.Popen[bytes], status: socket.socket):
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.pid = popen.pid
        self.info: Mapping[str, Any] = {}
        """What the child gave `shell.ready`."""
        self.beat: Beat | None = None
        """The latest heartbeat."""
        self.beat_s = 0.0
        """When it arrived."""
        self.on_beat: Callable[[Beat], None] = lambda beat: None
        """Called with each heartbeat, in the loop."""
        self.on_progress: Callable[[str], None] = lambda what: None
        """Called with what is being loaded, in the loop."""
        self.died: asyncio.Future[ProcessExit] = loop.create_future()
        """Resolves once, when the process is gone and reaped, whatever way it ended. Never fails.
        Wait for it with `asyncio.wait` or `asyncio.shield`: do not cancel it."""
        self._loop = loop
        self._popen = popen
        self._status = status
        self._verdict: asyncio.Future[Ready | Failed | ProcessExit] = loop.create_future()
        self._failed: Failed | None = None
        self._doing = "starting the interpreter"
        self._watch = ProgressWatch(popen.pid, time.monotonic)
        self._pidfd = os.pidfd_open(popen.pid)
        loop.add_reader(self._pidfd, self._on_exit)
        loop.add_reader(status, self._on_status)

    def __repr__(self) -> str:
        if self.died.done():
            return f"<ReplicaProcess {self.died.result()}>"
        state = "started" if self._verdict.done() else "starting"
        return f"<ReplicaProcess {self.spec.name} pid={self.pid} {state}>"

    @classmethod
    async def start(
        cls, target: ChildMain, spec: ReplicaSpec, kwargs: Mapping[str, object]
    ) -> ReplicaProcess:
        """Spawn and wait until the target called `shell.ready`.

        Raises:
            StageStartError: the child's own error on one line, or that it made no progress.
        """
        process = cls.spawn(target, spec, kwargs)
        await process.wait_ready()
        return process

    @classmethod
    def spawn(
        cls, target: ChildMain, spec: ReplicaSpec, kwargs: Mapping[str, object]
    ) -> ReplicaProcess:
        """Start the process and return at once; for callers with a handshake of their own."""
        if target.__module__ == "__main__":
            raise ValueError(f"target of a replica must be importable, got {target!r} of __main__")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        payload = os.memfd_create("vllm-omni-spawn", os.MFD_CLOEXEC)
        try:
            with open(os.dup(payload), "wb") as file:
                for part in (list(sys.path), spec, (target, dict(kwargs))):
                    pickle.dump(part, file)
            os.lseek(payload, 0, os.SEEK_SET)
            ours.setblocking(False)
            code = _BOOT.format(payload=payload, status=theirs.fileno(), parent=os.getpid())
            popen = subprocess.Popen(
                [sys.executable, "-c", code],
                env=child_environment(spec),
                stdin=subprocess.DEVNULL,
                pass_fds=(payload, theirs.fileno()),
                process_group=0,  # a terminal's Ctrl-C reaches the parent alone
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(payload)
        return cls(spec, popen, ours)

    async def wait_ready(self) -> None:
        """Wait for `shell.ready`; a process that does not get there is killed.

        Raises:
            StageStartError: as `start`.
        """
        try:
            while not self._verdict.done():
                await asyncio.wait({self._verdict}, timeout=min(1.0, self.spec.start_timeout_s / 4))
                if not self._verdict.done():
                    self._check_progress()
            verdict = self._verdict.result()
            if not isinstance(verdict, Ready):
                raise self._start_error(verdict)
        except BaseException:
            self.kill()
            await self._wait_died(_KILL_WAIT_S)
            raise
        self.info = verdict.info

    def _check_progress(self) -> None:
        idle_s = self._watch.idle_s()
        if idle_s > self.spec.start_timeout_s:
            raise StageStartError(
                f"stage {self.spec.name} made no progress for {idle_s:.0f} s while {self._doing}"
            )

    def _start_error(self, verdict: Failed | ProcessExit) -> StageStartError:
        if isinstance(verdict, Failed):
            return StageStartError(f"stage {self.spec.name} did not start: {verdict.message}")
        return StageStartError(f"{verdict} while {self._doing}")

    def own_error(self) -> str:
        """What the child has said of its failure by now, one line; empty: nothing."""
        if self._pidfd >= 0:
            self._on_status()
        return self._failed.message if self._failed is not None else ""

    def heartbeat(self) -> Heartbeat | None:
        """The latest heartbeat, for whoever watches that it goes on working."""
        if self.beat is None:
            return None
        figures = self.beat.figures
        return Heartbeat(
            self.beat_s, figures.get("progress", 0.0), figures.get("num_runnable", 0.0)
        )

    def send_signal(self, signum: signal.Signals) -> None:
        """Signal the process, if it still is there."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # its exit event is on the way
                signal.pidfd_send_signal(self._pidfd, signum)

    def kill(self) -> None:
        """SIGKILL; `died` resolves soon after."""
        self.send_signal(signal.SIGKILL)

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL after the timeout. Never raises; repeatable."""
        try:
            self.send_signal(signal.SIGTERM)
            await self._wait_died(timeout_s)
        finally:
            self.kill()
            if not await self._wait_died(_KILL_WAIT_S):
                logger.error("stage %s pid=%d survives SIGKILL", self.spec.name, self.pid)

    async def _wait_died(self, timeout_s: float) -> bool:
        await asyncio.wait({self.died}, timeout=timeout_s)
        return self.died.done()

    def _on_status(self) -> None:
        while True:
            try:
                packet = self._status.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                # End of file without an exit: nothing can be heard of it any more.
                self._loop.remove_reader(self._status)
                self.kill()
                return
            try:
                self._take(decode_status(packet))
            except msgspec.DecodeError as error:
                logger.error("stage %s sent a bad status packet: %s", self.spec.name, error)

    def _take(self, message: StatusMessage) -> None:
        match message:
            case Beat():
                self.beat = message
                self.beat_s = time.monotonic()
                self.on_beat(message)
            case Progress(what):
                self._doing = what
                self._watch.mark()
                self.on_progress(what)
            case Ready():
                self._decide(message)
            case Failed() if self._failed is not None:
                pass  # said twice: when it failed, and when it was about to end for it
            case Failed(text, detail):
                self._failed = message
                self._decide(message)
                logger.error("stage %s failed: %s\n%s", self.spec.name, text, detail)

    def _on_exit(self) -> None:
        self._on_status()  # what it said before it went
        self._loop.remove_reader(self._status)
        self._loop.remove_reader(self._pidfd)
        self._status.close()
        os.close(self._pidfd)
        self._pidfd = -1
        # Processes it started go with it. It is not reaped yet, so the group's id is still its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        ended = ProcessExit(self.spec.name, self._popen.wait(), self.own_error())
        self._decide(ended)
        self.died.set_result(ended)

    def _decide(self, verdict: Ready | Failed | ProcessExit) -> None:
        if not self._verdict.done():
            self._verdict.set_result(verdict)


def child_environment(spec: ReplicaSpec) -> dict[str, str]:
    """The child's environment: ours, its thread counts, then the spec's own variables."""
    environment = dict(os.environ)
    environment.update(dict.fromkeys(_THREAD_VARIABLES, str(spec.num_threads)))
    environment.update(spec.env)
    return environment
