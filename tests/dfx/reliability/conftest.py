"""One server at a time for all these tests: they break its parts and see them come back.

`VLLM_OMNI_RELIABILITY_URL` names a server that runs already, for machines with accelerators.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest

from benchmarks.served import serve
from tests.dfx.reliability.faulty_family import write_model, write_painter, write_plugin
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
from tests.dfx.reliability.requests import PICTURES, STAGES

URL: Final = os.environ.get("VLLM_OMNI_RELIABILITY_URL", "")
DEADLINE_S: Final = float(os.environ.get("VLLM_OMNI_RELIABILITY_DEADLINE_S", "20"))
"""`--request-timeout` of the server."""
TAKES_ORDERS: Final = "VLLM_OMNI_RELIABILITY_ORDERS" in os.environ
"""The server at the URL serves a family of `faulty_family`."""
_HERE: Final = Path(__file__).parent
_ROOT: Final = _HERE.parents[2]
_SMALL_SHM: Final = (
    'mount -t tmpfs -o size=256k tmpfs /dev/shm && exec setpriv --pdeathsig TERM -- "$@"'
)
_EACH_STAGE: Final = (
    "max_restarts=1000",
    f"restart_backoff_s={BACKOFF_S:g}",
    f"max_restart_backoff_s={BACKOFF_S:g}",
    f"stall_timeout_s={STALL_S:g}",
    "num_threads=1",
)


class Servers:
    """Starts the server that a module needs, after the one that another needed has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._stages: tuple[str, ...] = ()
        self._running: ServerUnderTest | None = None
        self._num_started = 0

    def with_stages(self, stages: tuple[str, ...]) -> ServerUnderTest:
        """The server of the speaking assistant or of the painter, by its stages.

        Skips the test when one runs already that has other stages.
        """
        if URL:
            if not set(stages) <= _stages_at(URL):
                pytest.skip(f"the server under test has no {', '.join(stages)}")
            return ServerUnderTest(URL, listening_pid(URL), TAKES_ORDERS, False, DEADLINE_S)
        if self._running is None or self._stages != stages:
            self.stop()
            self._running = self._start(stages)
            self._stages = stages
        return self._running

    def _start(self, stages: tuple[str, ...]) -> ServerUnderTest:
        paints = PICTURES in stages
        self._num_started += 1
        folder = self._folder / str(self._num_started)
        model = write_painter(folder / "model") if paints else write_model(folder / "model")
        plugin = write_plugin(folder / "plugin")
        inside = _in_small_shm()
        # pytest's own is too long for a socket.
        temporary = self._stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        served = self._stack.enter_context(
            serve(
                model,
                folder / "server.log",
                painter_arguments() if paints else arguments(),
                env={
                    "PYTHONPATH": os.pathsep.join([str(plugin), str(_ROOT)]),
                    "TMPDIR": temporary,
                },
                inside=inside,
                timeout_s=900.0,
            )
        )
        return ServerUnderTest(
            served.url,
            served.process.pid,
            True,
            bool(inside),
            DEADLINE_S,
            served.log,
            Path(temporary),
        )

    def stop(self) -> None:
        """End the server that runs."""
        self._running = None
        self._stack.close()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("reliability"))
    yield servers
    servers.stop()


@pytest.fixture(scope="module")
def server(servers: Servers) -> ServerUnderTest:
    """The speaking assistant: an autoregressive stage twice, and a one-shot one."""
    return servers.with_stages(STAGES)


@pytest.fixture(scope="module")
def painter_server(servers: Servers) -> ServerUnderTest:
    """The painter: one diffusion stage."""
    return servers.with_stages((PICTURES,))


@pytest.fixture
async def rig(server: ServerUnderTest) -> AsyncIterator[Rig]:
    async with attached(server) as rig:
        await _until_ready(rig)
        yield rig


@pytest.fixture
async def painter(painter_server: ServerUnderTest) -> AsyncIterator[Rig]:
    async with attached(painter_server) as rig:
        await _until_ready(rig)
        yield rig


async def _until_ready(rig: Rig) -> None:
    await rig.until_whole()
    await until(rig.is_idle, rig.server.deadline_s, "no stage has a request")


def arguments() -> list[str]:
    """Of the speaking server under test."""
    settings = ["thinker.num_replicas=2", "voice.num_replicas=2"]
    settings += [f"{stage}.{setting}" for stage in STAGES for setting in _EACH_STAGE]
    return [*_timeout(), "--max-speech-chars", "20000", *_each_as_option(settings)]


def painter_arguments() -> list[str]:
    """Of the painting server under test."""
    settings = ["num_replicas=2", *_EACH_STAGE]
    return [*_timeout(), *_each_as_option([f"{PICTURES}.{setting}" for setting in settings])]


def _timeout() -> list[str]:
    return ["--request-timeout", f"{DEADLINE_S:g}"]


def _each_as_option(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--stage", setting)]


def _stages_at(url: str) -> set[str]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10.0) as response:
            body = response.read()
    except urllib.error.HTTPError as error:  # 503 while a stage is dead
        body = error.read()
    return set(json.loads(body)["stages"])


def _in_small_shm() -> tuple[str, ...]:
    """A command that gives what it runs a /dev/shm of its own; nothing where that is forbidden."""
    namespace = ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-rm")
    prefix = (*namespace, "sh", "-c", _SMALL_SHM, "sh")
    try:
        tried = subprocess.run([*prefix, "true"], capture_output=True, timeout=30, check=False)
    except OSError:
        return ()
    return prefix if tried.returncode == 0 else ()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The painter's tests last, and of each server its own death: none is started twice."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    paints = item.path == _HERE / "test_diffusion.py"
    is_end = item.path == _HERE / "test_api_process.py"
    if is_end and isinstance(item, pytest.Function):
        paints = item.callspec.params["stages"] == (PICTURES,)
    return 2 * paints + is_end


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.write_sep("-", f"reliability figures ({load_average()})")
        for what, value in FIGURES:
            terminalreporter.write_line(f"{what}: {value}")
