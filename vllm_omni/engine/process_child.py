"""The child's side of the process shell: what runs in every replica's process before its target.

`boot` is the first thing the fresh interpreter calls. Imports are light: environment and thread
settings are in place (they came with exec) before the target brings in torch or vLLM.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import IO

from vllm_omni import envs
from vllm_omni.engine.interpreter import take_short_turns
from vllm_omni.engine.process_status import (
    Beat,
    Progress,
    Ready,
    StatusMessage,
    encode_status,
    failed_from,
)
from vllm_omni.engine.replica_spec import ReplicaSpec

logger = logging.getLogger(__name__)

BEAT_INTERVAL_S = 1.0
_PR_SET_PDEATHSIG = 1


def _no_figures() -> Mapping[str, float]:
    return {}


class ChildShell:
    """What a target may ask of its process. Methods are thread-safe."""

    def __init__(self, spec: ReplicaSpec, status: socket.socket) -> None:
        self.spec = spec
        self.figures: Callable[[], Mapping[str, float]] = _no_figures
        """Figures of the next beat; called in the beat thread, must be quick."""
        self._status = status
        self._lock = threading.Lock()
        self._on_stop: Callable[[], None] | None = None
        self._stop_asked = False
        self._leaving = False
        """The main thread has seen SIGTERM and unwinds."""
        self._signals, wakeup_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # Written by the C handler itself: a main thread about to block does not see its signal.
        signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)

    def ready(self, info: Mapping[str, object] | None = None) -> None:
        """Say that a real self-request went through; `info` reaches `ReplicaProcess.info`."""
        self.send(Ready(dict(info or {})))

    def progress(self, what: str) -> None:
        """Say what is being loaded; the start time-out begins anew."""
        self.send(Progress(what))

    def failed(self, error: BaseException) -> None:
        """Say what the target failed of, before it gets to its end."""
        self.send(failed_from(error, "".join(traceback.format_exception(error))))

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Handle SIGTERM by `callback`, in any thread and perhaps twice, instead of exiting."""
        self._on_stop = callback
        if self._stop_asked:
            callback()

    def send(self, message: StatusMessage, flags: int = 0) -> None:
        """Send one packet; a parent that is gone is noticed by the beat thread."""
        try:
            with self._lock:
                self._status.send(encode_status(message), flags)
        except OSError as error:
            logger.debug("status packet not sent: %s", error)

    def handle_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if self._on_stop is None and not self._leaving:
            self._leaving = True
            raise SystemExit(0)

    def beat_forever(self) -> None:
        """Beat about once a second; end the process at once when the parent is gone."""
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        poll.register(self._signals, select.POLLIN)
        next_beat_s = time.monotonic()
        while True:
            wait_s = max(0.0, next_beat_s - time.monotonic())
            ready = dict(poll.poll(wait_s * 1000))
            if self._status.fileno() in ready:
                # The parent never writes: readable means that it closed its end or died.
                os.kill(os.getpid(), signal.SIGKILL)
            if self._signals in ready:
                self._take_signals()
            elif not ready:
                self._beat()
                self._press_on()
                next_beat_s = time.monotonic() + BEAT_INTERVAL_S

    def _take_signals(self) -> None:
        if signal.SIGTERM in os.read(self._signals, 64) and not self._stop_asked:
            self._stop_asked = True
            if self._on_stop is not None:
                self._on_stop()
            self._press_on()

    def _press_on(self) -> None:
        """A main thread that blocked just when SIGTERM came has not run our handler: again."""
        ours = self._on_stop is None and signal.getsignal(signal.SIGTERM) == self.handle_sigterm
        if self._stop_asked and ours and not self._leaving:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _beat(self) -> None:
        times = os.times()
        try:
            figures = {name: float(value) for name, value in self.figures().items()}
        except Exception:
            logger.exception("figures of a beat failed")
            figures = {}
        beat = Beat(times.user + times.system, _rss_bytes(), figures)
        self.send(beat, socket.MSG_DONTWAIT)


ChildMain = Callable[..., None]
"""Target of a replica's process: `main(shell: ChildShell, /, **kwargs)`, at module level.
Returning ends the process."""


def boot(payload: IO[bytes], status_fd: int, parent_pid: int) -> None:
    """First call in the fresh interpreter. `payload` holds target, spec and kwargs, pickled."""
    die_with_parent(parent_pid)
    status = socket.socket(fileno=status_fd)
    spec: ReplicaSpec
    with payload:
        spec = pickle.load(payload)
        _prepare_process(spec)
        run_child(payload, spec, status)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that spawned it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before prctl
        os._exit(1)


def run_child(payload: IO[bytes], spec: ReplicaSpec, status: socket.socket) -> None:
    """Unpickle the target (this imports it), run it, report its exception, leave."""
    shell = ChildShell(spec, status)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    signal.signal(signal.SIGTERM, shell.handle_sigterm)
    threading.Thread(target=shell.beat_forever, name="beat", daemon=True).start()
    code = 0
    try:
        target: ChildMain
        target, kwargs = pickle.load(payload)
        target(shell, **kwargs)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:  # noqa: BLE001 - the process boundary: report and leave
        shell.failed(error)
        code = 1
    # Not sys.exit: threads and libraries of the target must not keep a finished process alive.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _prepare_process(spec: ReplicaSpec) -> None:
    import multiprocessing

    import setproctitle

    take_short_turns()
    setproctitle.setproctitle(f"vllm-omni: {spec.name}")
    multiprocessing.current_process().name = spec.name  # vLLM's log prefix
    faulthandler.enable()
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(
            f"%(levelname)s %(asctime)s ({spec.name} pid={os.getpid()}) %(name)s: %(message)s",
            datefmt="%m-%d %H:%M:%S",
        )
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("vllm_omni").setLevel(envs.log_level() or logging.INFO)


def _rss_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
