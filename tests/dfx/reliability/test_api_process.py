"""SIGKILL of the API process: its clients know at once, its replicas go with it, nothing stays.

The last test of each server: it is that one which dies.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from tests.dfx.reliability.conftest import URL, Servers
from tests.dfx.reliability.harness import (
    NOTICED_S,
    Lateness,
    Rig,
    assert_ended_in_time,
    attached,
    note,
)
from tests.dfx.reliability.processes import ended, send, shared_memory_of
from tests.dfx.reliability.requests import PICTURES, STAGES, ask, finish, streaming
from vllm_omni.distributed.run_directory import RunDirectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200, func_only=True),
    pytest.mark.skipif(bool(URL), reason="it ends the server: only one of its own"),
]

_ORPHANS_S = 5.0
"""How long a child may outlive the API process."""


@pytest.mark.parametrize("stages", [STAGES, (PICTURES,)], ids=["speaking", "painting"])
async def test_a_killed_server_leaves_nothing(servers: Servers, stages: tuple[str, ...]) -> None:
    server = servers.with_stages(stages)
    assert server.pid is not None
    assert server.temporary is not None
    # The folder outlives the processes that it was mounted for.
    shared = os.open(shared_memory_of(server.pid), os.O_RDONLY | os.O_DIRECTORY)
    try:
        async with attached(server) as rig:
            await rig.until_whole()
            num_replicas = await _kill_under_load(rig, server.pid, stages)
        _assert_nothing_stays(server.temporary, shared, num_replicas)
    finally:
        os.close(shared)
        servers.stop()


async def _kill_under_load(rig: Rig, pid: int, stages: tuple[str, ...]) -> int:
    """Kill the server while each stage works; how many replicas it had."""
    async with streaming(rig, stages, size=400) as streams:
        replicas = rig.server.replicas()
        with Lateness() as late:
            killed_s = send(pid, signal.SIGKILL)
            outcomes = await finish(streams)
    assert not any(one.succeeded for one in outcomes), [str(one) for one in outcomes]
    assert_ended_in_time(outcomes, rig.server.deadline_s)
    told_s = max(one.ended_s for one in outcomes) - killed_s
    note(f"SIGKILL of the server of {stages[0]}: its clients know after", f"{told_s * 1000:.0f} ms")
    assert told_s < NOTICED_S + late.allowance_s
    refused = await ask(rig.client, stages[0], size=3)
    assert refused.status == 0, refused
    await asyncio.gather(*(ended(one, _ORPHANS_S) for one in replicas.values()))
    gone_s = time.monotonic() - killed_s
    note(f"SIGKILL of the server of {stages[0]}: no process left after", f"{gone_s:.2f} s")
    return len(replicas)


def _assert_nothing_stays(temporary: Path, shared: int, num_replicas: int) -> None:
    base = temporary / f"vllm-omni-{os.getuid()}"
    left = [path.name.rpartition("-")[2] for path in base.iterdir()]
    assert len(left) == num_replicas, "a killed process removes nothing by itself, one before did"
    RunDirectory.create("next-start", base).remove()
    assert list(base.iterdir()) == []
    segments = " ".join(os.listdir(shared))
    assert not any(name in segments for name in left), segments
