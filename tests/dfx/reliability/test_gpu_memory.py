"""Memory of the accelerator runs out under a server: answers keep their form, the server lives.

Needs a server on GPUs of this host: `VLLM_OMNI_RELIABILITY_URL` names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import pytest

from benchmarks.load_client import SENTENCE, Outcome
from tests.dfx.reliability.conftest import URL
from tests.dfx.reliability.harness import (
    Rig,
    _assert_server_alive_after_fault,
    assert_ended_in_time,
    note,
)
from vllm_omni.errors import ERRORS_BY_CODE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900, func_only=True),
    pytest.mark.skipif(not URL, reason="VLLM_OMNI_RELIABILITY_URL names no server"),
]

_LARGE: Final = "Tell me everything about clocks, in all detail. " * 30
_HOG: Final = """
import sys, torch
held = []
for device in range(torch.cuda.device_count()):
    step = 1 << 30
    while step >= 1 << 20:
        try:
            held.append(torch.empty(step, dtype=torch.uint8, device=f"cuda:{device}"))
        except torch.OutOfMemoryError:
            step //= 2
print("full", flush=True)
sys.stdin.read()
"""
"""Takes the rest of every device's memory until its input is closed."""


@asynccontextmanager
async def no_memory_left() -> AsyncIterator[None]:
    """All memory of all GPUs that nobody has taken is taken."""
    hog = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOG, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert hog.stdout is not None
        async with asyncio.timeout(120):
            assert await hog.stdout.readline() == b"full\n"
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            hog.kill()
        await hog.communicate()


def assert_contract(outcomes: Sequence[Outcome], deadline_s: float) -> None:
    """Each is an answer, or an error of a known `code` and a status that is the server's fault."""
    for one in outcomes:
        if one.succeeded:
            continue
        assert one.code in ERRORS_BY_CODE, one
        assert one.status in (200, 500, 503, 504), one
    assert_ended_in_time(outcomes, deadline_s)


async def test_reliability_fault_gpu_oom_error_contract_consistent_chat_speech(rig: Rig) -> None:
    async with no_memory_left():
        outcomes = await asyncio.gather(
            rig.client.chat(_LARGE, max_tokens=256),
            rig.client.chat(_LARGE, max_tokens=256, audio=True),
            rig.client.speech(SENTENCE * 100),
        )
        malformed = await asyncio.gather(
            rig.client.post("/v1/chat/completions", {"messages": 3}),
            rig.client.post("/v1/audio/speech", {"input": 3}),
        )

    assert_contract(outcomes, rig.server.deadline_s)
    assert [one.status for one in malformed] == [400, 400]
    assert all(one.code in ERRORS_BY_CODE for one in malformed), [str(one) for one in malformed]
    await _assert_server_alive_after_fault(
        rig.server.host, rig.server.port, scenario="memory ran out under chat and speech"
    )


async def test_reliability_fault_gpu_oom_chat_large_payload_failure(rig: Rig) -> None:
    async with no_memory_left():
        outcomes = [await rig.client.chat(_LARGE * n, max_tokens=64) for n in (1, 4)]
        too_large = await rig.client.chat(_LARGE * 10_000, max_tokens=64)

    assert_contract(outcomes, rig.server.deadline_s)
    assert too_large.status == 400
    assert too_large.code == "invalid_request"
    await _assert_server_alive_after_fault(
        rig.server.host, rig.server.port, scenario="a large chat without memory"
    )


async def test_reliability_fault_gpu_oom_concurrent_pressure_failure(rig: Rig) -> None:
    async with no_memory_left():
        outcomes = await asyncio.gather(
            *(rig.client.chat(_LARGE, max_tokens=128, audio=i % 2 == 0) for i in range(16)),
            *(rig.client.speech(SENTENCE * 60) for _ in range(16)),
        )

    assert_contract(outcomes, rig.server.deadline_s)
    await _assert_server_alive_after_fault(
        rig.server.host, rig.server.port, scenario="32 requests without memory"
    )


async def test_reliability_fault_gpu_oom_state_converges_after_fault_removed(rig: Rig) -> None:
    async with no_memory_left():
        await asyncio.gather(
            *(rig.client.chat(_LARGE, max_tokens=128, audio=True) for _ in range(16))
        )
    whole_s = await rig.until_whole()
    after = await asyncio.gather(
        rig.client.chat("Hello", max_tokens=16),
        rig.client.chat("Hello", max_tokens=16, audio=True),
        rig.client.speech(SENTENCE),
    )

    note("memory is back: every replica serves after", f"{whole_s:.1f} s")
    assert all(one.succeeded for one in after), [str(one) for one in after]
