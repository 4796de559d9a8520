"""A diffusion replica in its own process: what the orchestrator sees of its life and death."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import numpy as np
import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.diffusion.bench import request
from tests.diffusion.replicas import Listener, draw, pid_of, running, stripe_spec
from tests.diffusion.stripes import drawn
from vllm_omni.engine.diffusion_client import DiffusionClient
from vllm_omni.errors import BadRequestError, StageStartError


async def test_eight_at_once_give_what_each_gives_alone() -> None:
    seeds = {f"r{i}": i for i in range(8)}
    async with running() as client:
        listener = Listener(client)
        for name, seed in seeds.items():
            await client.add_request_async(draw(name, seed=seed, num_inference_steps=3 + seed))
        await listener.until_ended(*seeds)

    for name, seed in seeds.items():
        frames = listener.ended[name].frames
        assert frames is not None
        expected = drawn(request(name, seed=seed, num_inference_steps=3 + seed))
        assert np.array_equal(frames.array()[0], expected)
        assert listener.steps[name][-1] == 3 + seed


async def test_an_abort_ends_the_work_and_the_next_one_is_served() -> None:
    async with running(max_batch_size=1) as client:
        listener = Listener(client)
        await client.add_request_async(draw("long", num_inference_steps=1000))
        await listener.until_step("long", 3)
        await client.abort_requests_async(["long"])
        await client.add_request_async(draw("next"))
        await listener.until_ended("next")
        await client.add_request_async(draw("kept", "!kept"))
        await listener.until_ended("kept")
        figures = await client.call_utility_async("figures")

    assert "long" not in listener.ended
    assert listener.ended["kept"].failure is None
    assert isinstance(figures, dict)
    assert figures["num_states"] == 0


async def test_a_deadline_ends_a_request_while_it_steps() -> None:
    async with running() as client:
        listener = Listener(client)
        deadline_s = time.monotonic() + 0.3
        await client.add_request_async(
            draw("late", num_inference_steps=1000, deadline_s=deadline_s)
        )
        await listener.until_ended("late")

    failure = listener.ended["late"].failure
    assert failure is not None
    assert failure.code == "deadline_exceeded"
    assert "of 1000" in failure.message


async def test_a_hanging_step_does_not_hold_up_commands() -> None:
    async with running() as client:
        listener = Listener(client)
        deadline_s = time.monotonic() + 0.3
        await client.add_request_async(draw("stuck", "!hang", deadline_s=deadline_s))
        await listener.until_ended("stuck")
        figures = await client.call_utility_async("figures")

    failure = listener.ended["stuck"].failure
    assert failure is not None
    assert failure.code == "deadline_exceeded"
    assert isinstance(figures, dict)


async def test_killed_while_denoising_it_is_dead_at_once_for_everyone_who_waits() -> None:
    async with running() as client:
        listener = Listener(client)
        await client.add_request_async(draw("a", num_inference_steps=1000))
        await listener.until_step("a", 2)
        os.kill(pid_of(client), signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await listener.until_ended("a")
        took_s = time.monotonic() - began_s
        with pytest.raises(EngineDeadError):
            await client.add_request_async(draw("b"))

    assert took_s < 5


async def test_a_stop_ends_what_runs_and_says_so() -> None:
    client = await DiffusionClient.start(stripe_spec())
    listener = Listener(client)
    await client.add_request_async(draw("a", num_inference_steps=1000))
    await listener.until_step("a", 2)
    stopping = asyncio.create_task(client.shutdown_async(10.0))
    with pytest.raises(EngineDeadError):
        await listener.until_ended("a", "never")
    await stopping

    assert "a" not in listener.ended or listener.ended["a"].failure is not None


async def test_a_self_test_that_fails_stops_the_start_with_its_error() -> None:
    with pytest.raises(StageStartError, match="no kernel image"):
        async with running(model_class="tests.diffusion.stripes:BrokenPipeline"):
            raise AssertionError("it must not start")


async def test_an_option_it_does_not_know_stops_the_start() -> None:
    with pytest.raises(StageStartError, match="warp_speed"):
        async with running(engine_args={"warp_speed": 9}):
            raise AssertionError("it must not start")


async def test_refusals_a_big_picture_and_then_sleep() -> None:
    async with running() as client:
        with pytest.raises(BadRequestError, match="multiple of 16"):
            await client.add_request_async(draw("b", height=33, width=32))
        listener = Listener(client)
        await client.add_request_async(draw("a", height=2048, width=2048))
        await listener.until_ended("a")
        before = _cpu_s(pid_of(client))
        await asyncio.sleep(1.5)
        after = _cpu_s(pid_of(client))

    frames = listener.ended["a"].frames
    assert frames is not None
    assert np.array_equal(frames.array()[0], drawn(request("a", height=2048, width=2048)))
    assert frames.image().size == (2048, 2048)
    assert after - before < 0.2  # idle


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
