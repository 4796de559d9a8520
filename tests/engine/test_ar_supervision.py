"""A real autoregressive replica under the supervisor: killed, stopped, and what its beats say."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
import weakref
from pathlib import Path

import pytest

from tests.ar_replicas import ENGINE_ARGS, greedy, replica, spec_of
from tests.dfx.reliability.orders import Fault, seed_for
from tests.engine.rig import Rig, running
from tests.fakes import chain_pipeline, eventually
from tests.tiny_models import make_tiny_llama
from vllm_omni.engine.ar_client import ArClient
from vllm_omni.engine.ar_launch import start_ar_replica
from vllm_omni.engine.metrics_protocol import NullMetrics
from vllm_omni.engine.queue_messages import AddRequest
from vllm_omni.engine.restart import RestartPolicy
from vllm_omni.engine.stage_client import Heartbeat
from vllm_omni.engine.supervisor import Supervisor
from vllm_omni.inputs.prompt import OmniPrompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = OmniPrompt(token_ids=[12, 40, 77, 5, 130, 9])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


async def beats(client: ArClient, num: int) -> list[Heartbeat]:
    """The next heartbeats."""
    seen: list[Heartbeat] = []
    last = client.heartbeat()
    async with asyncio.timeout(20):
        while len(seen) < num:
            beat = client.heartbeat()
            if beat is not None and (last is None or beat.received_s > last.received_s):
                seen.append(beat)
                last = beat
            await asyncio.sleep(0.05)
    return seen


async def test_its_beats_show_runnable_work_and_progress_on_it(model_dir: Path) -> None:
    async with replica(model_dir, stage="s0") as thinker:
        idle = (await beats(thinker.client, 2))[-1]
        assert idle.num_runnable == 0
        for i in range(8):
            await thinker.submit(f"r{i}", PROMPT, greedy(500))
        busy = await beats(thinker.client, 2)
        for i in range(8):
            await thinker.all(f"r{i}")
        assert busy[-1].progress > idle.progress
        after = await beats(thinker.client, 2)
        assert (after[0].progress, after[1].num_runnable) == (after[1].progress, 0)


async def test_a_long_call_is_no_hang_of_the_requests_that_wait_for_its_end(
    model_dir: Path,
) -> None:
    faulty = {**ENGINE_ARGS, "worker_cls": "tests.dfx.reliability.faulty_worker.FaultyWorker"}
    async with replica(model_dir, stage="s0", engine_args=faulty) as thinker:
        await thinker.submit("running", PROMPT, greedy(400, seed=seed_for(Fault.PACE, 10)))
        await beats(thinker.client, 1)
        nap = asyncio.create_task(
            thinker.client.call_utility_async("collective_rpc", "nap", None, [4.0])
        )
        seen = await beats(thinker.client, 3)
        assert not nap.done()
        assert seen[-1].progress == seen[-2].progress
        assert seen[-1].num_runnable == 0
        await nap
        assert (await thinker.all("running"))[-1].failure is None


@pytest.mark.parametrize(
    ("how", "text"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "no sign of life")]
)
async def test_it_comes_back_with_a_real_generation_and_serves(
    how: signal.Signals, text: str, model_dir: Path
) -> None:
    rig = Rig([[None]], chain_pipeline(1))
    supervisor = Supervisor(
        [spec_of(model_dir, stage="s0")],
        rig.pools,
        start_ar_replica,
        [RestartPolicy(first_backoff_s=0.1, stall_timeout_s=10.0)],
        NullMetrics(),
    )
    await supervisor.start_all()
    rig.orchestrator.supervised_by(supervisor)
    supervisor.begin(rig.orchestrator)
    async with asyncio.timeout(400), running(rig, 400.0):
        first = rig.pools[0].clients[0]
        assert isinstance(first, ArClient)
        rig.inbox.put(request(rig, "a", 1_000_000))
        await eventually(lambda: "a" in rig.known)
        os.kill(first.pid, how)
        (error,) = await rig.next_errors(60)
        assert (error.request_id, error.code) == ("a", "replica_died")
        assert text in error.error
        (status,) = supervisor.statuses()
        assert status.state in ("backoff", "starting")
        began_s = time.monotonic()
        await eventually(lambda: supervisor.statuses()[0].state == "ready", timeout_s=300)
        took_s = supervisor._replicas[0, 0].start_took_s
        assert took_s is not None
        assert time.monotonic() - began_s < 0.1 + took_s + 1.0
        rig.inbox.put(request(rig, "b", 5))
        output = await rig.next_output(60)
        assert output.request_id == "b"
        assert len(output.output.text.outputs[0].token_ids) == 5
        parts = (first, first._core, first._prompts, first._prompts.vllm_config)
        of_the_dead = [weakref.ref(part) for part in parts]
        del first, parts
        await eventually(lambda: is_gone(of_the_dead), timeout_s=10)


def is_gone(references: list[weakref.ref[object]]) -> bool:
    gc.collect()
    return all(reference() is None for reference in references)


def request(rig: Rig, request_id: str, max_tokens: int) -> AddRequest:
    message = rig.request(request_id, rig.plan())
    message.prompt = PROMPT
    message.params = (greedy(min(max_tokens, 400), min_tokens=min(max_tokens, 400)),)
    return message
