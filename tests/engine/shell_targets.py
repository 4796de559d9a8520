"""What the processes of `test_process_shell.py` run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from vllm_omni.engine.process_child import ChildShell


def serve(shell: ChildShell, /) -> None:
    shell.ready(
        {
            "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
            "mine": os.environ.get("MINE"),
            "switch_interval_s": sys.getswitchinterval(),
        }
    )
    while True:
        signal.pause()


def serve_with_child(shell: ChildShell, /) -> None:
    grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    shell.ready({"grandchild": grandchild.pid})
    signal.pause()


def serve_deaf(shell: ChildShell, /) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(shell)


def serve_until_stopped(shell: ChildShell, /, *, goodbye: str) -> None:
    """Says goodbye in a file before it leaves."""
    stopped = threading.Event()
    shell.on_stop(stopped.set)
    shell.ready()
    stopped.wait()
    with open(goodbye, "w") as file:
        file.write("bye")


def fail(shell: ChildShell, /) -> None:
    shell.progress("reading weights")
    raise ValueError("weights are\n  missing")


def say_and_stay(shell: ChildShell, /) -> None:
    shell.failed(RuntimeError("the device is gone"))
    shell.failed(RuntimeError("and so am I"))
    serve(shell)


def hang(shell: ChildShell, /) -> None:
    shell.progress("reading weights")
    signal.pause()


def work_then_serve(shell: ChildShell, /, *, seconds: float) -> None:
    """Loads without a word for longer than the time-out."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(100_000))
    serve(shell)


def die(shell: ChildShell, /) -> None:
    shell.progress("reading weights")
    os.kill(os.getpid(), signal.SIGKILL)


def return_at_once(shell: ChildShell, /) -> None:
    pass


def fail_while_serving(shell: ChildShell, /) -> None:
    shell.ready()
    raise RuntimeError("the device is lost")
