"""A diffusion replica of two ranks: equal to one rank, and what one rank's fault costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from tests.diffusion.bench import request
from tests.diffusion.conftest import one_thread
from tests.diffusion.replicas import Listener, draw, pid_of, running, stripe_spec
from tests.processes import Family
from vllm_omni.diffusion.executor.jobs import Decode, Made, Prepare, Step
from vllm_omni.diffusion.models.qwen_image.tiny import make_tiny
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.engine.diffusion_client import DiffusionClient
from vllm_omni.engine.process_status import Heartbeat
from vllm_omni.errors import ConfigError, StageStartError

__all__ = ["one_thread"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

QWEN = {"capabilities": "vllm_omni.diffusion.models.qwen_image.capabilities:text_to_image"}
RANKS = {"devices": ("cpu", "cpu"), "num_threads": 2}
GUIDED = {
    "height": 64,
    "width": 64,
    "negative_prompt": "blurry",
    "true_cfg_scale": 4.0,
    "num_inference_steps": 6,
}
Alone = Callable[..., NDArray[np.uint8]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> Alone:
    """What one rank makes of a request that has it for itself."""
    model_class = "vllm_omni.diffusion.models.qwen_image.diffusion_pipeline:QwenImage"
    spec = stripe_spec(model_dir=model_dir, model_class=model_class, **QWEN)
    runner = Worker(spec, lambda what: None).runner

    def make(prompt: str, **fields: Any) -> NDArray[np.uint8]:
        one = request("r", prompt, **{**GUIDED, **fields})
        runner.run(Prepare(one), lambda result: None)
        for _ in range(one.num_inference_steps):
            runner.run(Step(("r",)), lambda result: None)
        made = runner.run(Decode("r"), lambda result: None)
        assert isinstance(made, Made)
        assert made.pixels is not None
        return made.pixels

    return make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(model_dir: Path) -> AsyncIterator[DiffusionClient]:
    model_class = "tests.diffusion.rank_models:FaultyQwenImage"
    async with running(model_dir=model_dir, model_class=model_class, **QWEN, **RANKS) as client:
        yield client


@pytest.fixture
def listener(client: DiffusionClient) -> Listener:
    return Listener(client)


async def add(listener: Listener, name: str, prompt: str | None = None, **fields: Any) -> None:
    await listener.client.add_request_async(draw(name, prompt, **{**GUIDED, **fields}))


def assert_is(listener: Listener, name: str, expected: NDArray[np.uint8]) -> None:
    output = listener.ended[name]
    assert output.frames is not None, output.failure
    pixels = output.frames.array()[0].astype(int)
    assert pixels.std() > 1, "a picture of one colour shows nothing"
    assert np.abs(pixels - expected).max() <= 1


def failure(listener: Listener, name: str) -> tuple[str, str]:
    found = listener.ended[name].failure
    assert found is not None
    return found.code, found.message


async def nothing_held(client: DiffusionClient) -> None:
    """Figures of ranks are as old as their heartbeats."""
    async with asyncio.timeout(10):
        while True:
            figures = await client.call_utility_async("figures")
            assert isinstance(figures, dict)
            assert figures["num_ranks"] == 2
            if not figures["num_states"]:
                return
            await asyncio.sleep(0.2)


async def next_beat(client: DiffusionClient) -> Heartbeat:
    now_s = time.monotonic()
    async with asyncio.timeout(10):
        while True:
            beat = client.heartbeat()
            if beat is not None and beat.received_s > now_s:
                return beat
            await asyncio.sleep(0.1)


async def test_one_guided_request_is_what_one_rank_makes(listener: Listener, alone: Alone) -> None:
    await add(listener, "a", "a red fox", seed=4)
    await listener.until_ended("a")

    assert_is(listener, "a", alone("a red fox", seed=4))
    assert listener.steps["a"] == [1, 2, 3, 4, 5, 6, 6]  # the last one with the picture


async def test_without_guidance_one_rank_has_the_row(listener: Listener, alone: Alone) -> None:
    await add(listener, "a", "a cat", negative_prompt=None)
    await listener.until_ended("a")

    assert_is(listener, "a", alone("a cat", negative_prompt=None))


async def test_four_that_come_one_after_another_while_one_leaves(
    listener: Listener, alone: Alone
) -> None:
    prompts = {"a": "a fox", "b": "a blue house by the sea", "c": "cat", "d": "four lazy dogs"}
    fields = {
        name: {"seed": 20 + i, "num_inference_steps": 40 - 8 * i} for i, name in enumerate(prompts)
    }
    for name, prompt in prompts.items():
        await add(listener, name, prompt, **fields[name])
        await listener.until_step(name, 2)
    await listener.client.abort_requests_async(["b"])
    await listener.until_ended("a", "c", "d")

    assert "b" not in listener.ended
    for name in ("a", "c", "d"):
        assert_is(listener, name, alone(prompts[name], **fields[name]))
    await nothing_held(listener.client)


@pytest.mark.parametrize("word", ["!starved", "!guide"])
async def test_a_rank_without_memory_fails_that_request_alone(
    listener: Listener, alone: Alone, word: str
) -> None:
    """Before the rows are exchanged, or after: all ranks have the same requests in the end."""
    pid = pid_of(listener.client)
    await add(listener, "a", "a red fox", num_inference_steps=30)
    await listener.until_step("a", 2)
    await add(listener, "b", f"{word} fox")
    await add(listener, "c", "a dog")
    await listener.until_ended("a", "b", "c")
    await add(listener, "d", "a house")
    await listener.until_ended("d")

    code, message = failure(listener, "b")
    assert code == "out_of_memory"
    assert "rank 1: OutOfMemoryError: CUDA out of memory" in message
    assert_is(listener, "a", alone("a red fox", num_inference_steps=30))
    assert_is(listener, "c", alone("a dog"))
    assert_is(listener, "d", alone("a house"))
    assert pid_of(listener.client) == pid


async def test_a_rank_with_memory_for_one_row_at_a_time_is_enough(
    listener: Listener, alone: Alone
) -> None:
    names = ("a", "b", "c")
    for name in names:
        await add(listener, name, f"!crowded {name}", num_inference_steps=12)
    await listener.until_ended(*names)

    for name in names:
        assert_is(listener, name, alone(f"!crowded {name}", num_inference_steps=12))


async def test_what_one_rank_cannot_encode_fails_and_leaves_nothing(
    listener: Listener, alone: Alone
) -> None:
    await add(listener, "a", "!encode a")
    await listener.until_ended("a")
    await add(listener, "b", "a dog")
    await listener.until_ended("b")

    assert failure(listener, "a")[0] == "request_failed"
    assert "cannot encode that" in failure(listener, "a")[1]
    assert_is(listener, "b", alone("a dog"))
    await nothing_held(listener.client)


async def test_a_rank_that_hangs_holds_up_no_deadline_and_counts_as_no_progress(
    listener: Listener,
) -> None:
    """With one that lasts the supervisor has the replica replaced."""
    await add(listener, "a", "!hang a", deadline_s=time.monotonic() + 1.5)
    await listener.until_ended("a")
    beat = await next_beat(listener.client)

    code, message = failure(listener, "a")
    assert code == "deadline_exceeded"
    assert "at step 1 of 6" in message
    assert beat.num_runnable == 1


async def test_after_its_end_no_process_is_left_though_one_hangs(client: DiffusionClient) -> None:
    family = Family(pid_of(client))
    assert len(family) == 2
    await client.shutdown_async(5.0)

    assert family.alive_after(5.0) == []
    family.close()


async def test_a_model_that_cannot_share_its_steps_does_not_start() -> None:
    with pytest.raises(StageStartError, match=r"stages\.dit\.devices: SlowStripePipeline does not"):
        async with running(**RANKS):
            raise AssertionError("it must not start")


async def test_a_model_without_steps_is_refused_before_anything_starts() -> None:
    spec = stripe_spec(capabilities="tests.diffusion.stripes:whole_capabilities", **RANKS)
    with pytest.raises(ConfigError, match=r"stages\.dit\.devices: this model runs whole requests"):
        await DiffusionClient.start(spec)
