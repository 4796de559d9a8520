"""What the diffusion engine costs and what sharing a step saves, on a tiny random checkpoint.

Reported are

* four requests at once against one alone, the server's process and all,
* what the engine adds to a denoise step: the lanes, the decisions and the reports of the real
  engine in this process, against a loop that calls the same pipeline,
* how long one more request needs to be admitted, and how long one too many to be refused, while
  1,000 wait.

    python benchmarks/diffusion.py [--model FOLDER] [--json] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.make_tiny import families
from vllm_omni.config.pipeline import StageKind
from vllm_omni.diffusion.engine import DiffusionEngine
from vllm_omni.diffusion.executor.in_process import InProcessExecutor
from vllm_omni.diffusion.models.interface import DenoiseState, StepPipeline
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.sched.table import ItemTable
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import OverloadedError
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams

GOALS = {
    "four_against_one": "<= 2.2",
    "step_overhead_ms": "<= 1",
    "admit_ms_behind_1000": "<= 10",
    "refuse_ms_behind_1000": "<= 10",
}
NUM_WAITING = 1000
NUM_TRIALS = 20


def request(request_id: str, num_steps: int) -> DiffusionRequest:
    return DiffusionRequest(
        request_id=request_id,
        prompt="a cat",
        seed=1,
        num_inference_steps=num_steps,
        height=64,
        width=64,
    )


def load(model: Path) -> Worker:
    from vllm_omni.config.detect import detect
    from vllm_omni.config.registry import load_pipeline

    name = detect(model)
    assert name is not None, f"{model} is no diffusers folder"
    stages = load_pipeline(name, model).stages
    [stage] = [stage for stage in stages if stage.kind is StageKind.DIFFUSION]
    spec = ReplicaSpec(
        stage=stage.name,
        stage_id=0,
        replica_id=0,
        kind=StageKind.DIFFUSION,
        model_dir=model,
        model_class=stage.model_class,
        capabilities=stage.capabilities,
        devices=("cpu",),
        num_threads=torch.get_num_threads(),
        max_batch_size=4,
        start_timeout_s=60,
    )
    return Worker(spec, lambda what: None)


def bare_steps_s(worker: Worker, num_steps: int) -> float:
    """Seconds that a loop around the pipeline needs."""
    pipeline = cast(StepPipeline, worker.pipeline)
    with torch.inference_mode():
        one = request("bare", num_steps)
        state: DenoiseState = pipeline.prepare(one, pipeline.encode([one])[0])
        began_s = time.perf_counter()
        while not state.is_done:
            pipeline.denoise_step([state])
        return time.perf_counter() - began_s


def engine_steps_s(worker: Worker, num_steps: int) -> float:
    """Seconds from the first to the last step that the engine reports."""
    woken = threading.Event()
    executor = InProcessExecutor(worker.runner, woken.set)
    engine = DiffusionEngine(
        "diffusion",
        executor,
        ItemTable(4, 8),
        mode=worker.capabilities.mode,
        emits_video=False,
        clock=time.monotonic,
    )
    engine.add(request("engine", num_steps + 1))
    first_s = last_s = 0.0
    while len(engine):
        for output in engine.step():
            if output.progress is not None and not output.finished:
                last_s = time.perf_counter()
                first_s = first_s or last_s
        if len(engine):
            woken.wait()
            woken.clear()
    executor.close()
    return last_s - first_s


def step_overhead_ms(worker: Worker, num_steps: int, rounds: int) -> tuple[float, float]:
    """Milliseconds that the engine adds to a step, and its time over the bare loop's."""
    bare_steps_s(worker, num_steps)
    bare, ours = [], []
    for _ in range(rounds):
        bare.append(bare_steps_s(worker, num_steps))
        ours.append(engine_steps_s(worker, num_steps))
    bare_s, ours_s = statistics.median(bare), statistics.median(ours)
    return (ours_s - bare_s) / num_steps * 1000, ours_s / bare_s


async def together_s(omni: AsyncOmni, prompts: Sequence[str], num_steps: int) -> float:
    """Seconds until every picture is there."""

    async def one(seed: int, prompt: str) -> None:
        params = OmniDiffusionSamplingParams(
            seed=seed, num_inference_steps=num_steps, height=64, width=64
        )
        async for _ in omni.generate(prompt, params):
            pass

    began_s = time.perf_counter()
    await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))
    return time.perf_counter() - began_s


async def until_in_flight(omni: AsyncOmni, num: int) -> None:
    """Let the loop turn until so many are admitted."""
    for _ in range(100_000):
        if omni.num_in_flight == num:
            return
        await asyncio.sleep(0)
    raise RuntimeError(f"{omni.num_in_flight} requests are in flight, not {num}")


async def behind_a_queue_ms(omni: AsyncOmni) -> tuple[list[float], list[float]]:
    """Milliseconds for one more request to be admitted, and for one too many to be refused; each
    several times, the last one leaves before the next one comes."""
    params = OmniDiffusionSamplingParams(seed=0, num_inference_steps=500, height=64, width=64)

    async def wait() -> None:
        async for _ in omni.generate("a cat", params):
            pass

    async def leave(*tasks: asyncio.Task[None]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    waiting = [asyncio.create_task(wait()) for _ in range(NUM_WAITING)]
    await until_in_flight(omni, NUM_WAITING)
    admitted_ms, refused_ms = [], []
    for _ in range(NUM_TRIALS):
        began_s = time.perf_counter()
        last = asyncio.create_task(wait())
        await until_in_flight(omni, NUM_WAITING + 1)
        admitted_ms.append((time.perf_counter() - began_s) * 1000)
        began_s = time.perf_counter()
        with contextlib.suppress(OverloadedError):
            await wait()
            raise RuntimeError("one request too many was not refused")
        refused_ms.append((time.perf_counter() - began_s) * 1000)
        await leave(last)
    await leave(*waiting)
    return admitted_ms, refused_ms


async def measure(model: Path, scale: float) -> dict[str, float]:
    num_steps = int(40 * scale)
    overhead_ms, ratio = step_overhead_ms(load(model), num_steps, rounds=5)
    limits = {"max_in_flight": NUM_WAITING + 1}
    async with await AsyncOmni.create(str(model), **limits) as omni:
        await together_s(omni, ["warm"], num_steps)
        rounds = [
            (
                await together_s(omni, ["a cat"], num_steps),
                await together_s(omni, ["a cat", "a dog", "a house", "the sea"], num_steps),
            )
            for _ in range(3)
        ]
        admitted_ms, refused_ms = await behind_a_queue_ms(omni)
    one_s, four_s = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {
        "one_s": round(one_s, 3),
        "four_against_one": round(four_s / one_s, 2),
        "step_overhead_ms": round(overhead_ms, 3),
        "engine_against_loop": round(ratio, 3),
        "admit_ms_behind_1000": round(statistics.median(admitted_ms), 2),
        "admit_ms_behind_1000_max": round(max(admitted_ms), 2),
        "refuse_ms_behind_1000": round(statistics.median(refused_ms), 2),
        "refuse_ms_behind_1000_max": round(max(refused_ms), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a diffusers folder; default: a tiny random one")
    parser.add_argument("--family", default="qwen_image", choices=sorted(families()))
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    arguments = parser.parse_args()
    # Of this process: a team of threads over products so small would measure how they meet.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make(arguments.family, Path(folder) / "model")
        figures = asyncio.run(measure(model, 0.1 if arguments.quick else 1.0))
    print(f"{'figure':30} {'value':>12}   goal")
    for name, value in figures.items():
        print(f"{name:30} {value:>12}   {GOALS.get(name, '')}")
    if arguments.json:
        print(json.dumps(figures))


def make(family: str, folder: Path) -> Path:
    import importlib

    path: Path = importlib.import_module(families()[family]).make_tiny(folder)
    return path


if __name__ == "__main__":
    main()
