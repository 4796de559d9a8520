"""SIGKILL of the API process: its clients know at once, its replicas go with it, nothing stays."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks.load_client import connected
from benchmarks.served import Server, serve
from tests.dfx.reliability.conftest import URL, arguments
from tests.dfx.reliability.faulty_family import write_model, write_plugin
from tests.dfx.reliability.harness import (
    NOTICED_S,
    Lateness,
    Rig,
    ServerUnderTest,
    assert_ended_in_time,
    note,
)
from tests.dfx.reliability.processes import ended, replica_pids
from tests.dfx.reliability.requests import STAGES, ask, finish, streaming
from vllm_omni.distributed.run_directory import RunDirectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200, func_only=True),
    pytest.mark.skipif(bool(URL), reason="it ends the server: only one of its own"),
]

_ROOT = Path(__file__).parents[3]
_ORPHANS_S = 5.0
"""How long a child may outlive the API process."""


async def test_a_killed_server_leaves_nothing(tmp_path: Path) -> None:
    plugin = write_plugin(tmp_path / "plugin")
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        environment = {
            "PYTHONPATH": os.pathsep.join([str(plugin), str(_ROOT)]),
            "TMPDIR": temporary,
        }
        model = write_model(tmp_path / "model")
        with serve(
            model, tmp_path / "server.log", arguments(), env=environment, timeout_s=900.0
        ) as served:
            await _kill_under_load(served, tmp_path)
        base = Path(temporary) / f"vllm-omni-{os.getuid()}"
        left = [path.name.rpartition("-")[2] for path in base.iterdir()]
        assert len(left) == 5, "a killed process removes nothing by itself"
        RunDirectory.create("next-start", base).remove()
        assert list(base.iterdir()) == []
    shared = " ".join(os.listdir("/dev/shm"))
    assert not any(name in shared for name in left), shared


async def _kill_under_load(served: Server, tmp_path: Path) -> None:
    server = ServerUnderTest(served.url, served.process.pid, True, False, 20.0, served.log)
    async with connected(served.url, timeout_s=40.0) as client:
        async with streaming(Rig(server, client), STAGES, size=400) as streams:
            replicas = replica_pids(served.process.pid)
            with Lateness() as late:
                killed_s = time.monotonic()
                os.kill(served.process.pid, signal.SIGKILL)
                outcomes = await finish(streams)
        assert len(replicas) == 5
        assert not any(one.succeeded for one in outcomes), [str(one) for one in outcomes]
        assert_ended_in_time(outcomes, 20.0)
        told_s = max(one.ended_s for one in outcomes) - killed_s
        note("SIGKILL of the server: its clients know after", f"{told_s * 1000:.0f} ms")
        assert told_s < NOTICED_S + late.allowance_s
        refused = await ask(client, "thinker", size=3)
        assert refused.status == 0, refused
        await asyncio.gather(*(ended(pid, _ORPHANS_S) for pid in replicas.values()))
        note("SIGKILL of the server: no process left after", f"{time.monotonic() - killed_s:.2f} s")
