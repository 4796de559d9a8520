"""One server for all these tests: they break its parts and see them come back.

`VLLM_OMNI_RELIABILITY_URL` names a server that runs already, for machines with accelerators.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest

from benchmarks.served import serve
from tests.dfx.reliability.faulty_family import write_model, write_plugin
from tests.dfx.reliability.harness import (
    BACKOFF_S,
    FIGURES,
    STALL_S,
    Rig,
    ServerUnderTest,
    attached,
    load_average,
    until,
)
from tests.dfx.reliability.processes import listening_pid

URL: Final = os.environ.get("VLLM_OMNI_RELIABILITY_URL", "")
DEADLINE_S: Final = float(os.environ.get("VLLM_OMNI_RELIABILITY_DEADLINE_S", "20"))
"""`--request-timeout` of the server."""
TAKES_ORDERS: Final = "VLLM_OMNI_RELIABILITY_ORDERS" in os.environ
"""The server at the URL serves `faulty_family`."""
_ROOT: Final = Path(__file__).parents[3]
_SMALL_SHM: Final = (
    'mount -t tmpfs -o size=256k tmpfs /dev/shm && exec setpriv --pdeathsig TERM -- "$@"'
)
_EACH_STAGE: Final = (
    "max_restarts=1000",
    f"restart_backoff_s={BACKOFF_S:g}",
    f"max_restart_backoff_s={BACKOFF_S:g}",
    f"stall_timeout_s={STALL_S:g}",
)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    if URL:
        yield ServerUnderTest(URL, listening_pid(URL), TAKES_ORDERS, False, DEADLINE_S)
        return
    folder = tmp_path_factory.mktemp("reliability")
    model = write_model(folder / "model")
    plugin = write_plugin(folder / "plugin")
    inside = _in_small_shm()
    with serve(
        model,
        folder / "server.log",
        arguments(),
        env={"PYTHONPATH": os.pathsep.join([str(plugin), str(_ROOT)])},
        inside=inside,
        timeout_s=900.0,
    ) as served:
        yield ServerUnderTest(
            served.url, served.process.pid, True, bool(inside), DEADLINE_S, served.log
        )


@pytest.fixture
async def rig(server: ServerUnderTest) -> AsyncIterator[Rig]:
    async with attached(server) as rig:
        await rig.until_whole()
        await until(rig.is_idle, server.deadline_s, "no stage has a request")
        yield rig


def arguments() -> list[str]:
    """Of the server under test."""
    words = ["--request-timeout", f"{DEADLINE_S:g}", "--max-speech-chars", "20000"]
    settings = ["thinker.num_replicas=2", "voice.num_replicas=2"]
    for stage in ("asr", "thinker", "voice"):
        settings += [f"{stage}.{setting}" for setting in (*_EACH_STAGE, "num_threads=1")]
    return [*words, *(word for setting in settings for word in ("--stage", setting))]


def _in_small_shm() -> tuple[str, ...]:
    """A command that gives what it runs a /dev/shm of its own; nothing where that is forbidden."""
    namespace = ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-rm")
    prefix = (*namespace, "sh", "-c", _SMALL_SHM, "sh")
    try:
        tried = subprocess.run([*prefix, "true"], capture_output=True, timeout=30, check=False)
    except OSError:
        return ()
    return prefix if tried.returncode == 0 else ()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.write_sep("-", f"reliability figures ({load_average()})")
        for what, value in FIGURES:
            terminalreporter.write_line(f"{what}: {value}")
