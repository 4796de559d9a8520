"""The diffusion engine beside bare diffusers, on one model and device, in one run.

Both use the same modules with the same weights and the same compiled blocks: `bare` is diffusers'
own pipeline called in a loop, `engine` the scheduler, lanes and runner of a replica in this
process. Reported are, for each size,

* denoise, decode and whole time of one request, bare and engine (median of the rounds),
* pictures per second of several clients at once against one after another,
* the largest batch that formed, and the peak of device memory.

    python benchmarks/diffusion_serve.py MODEL [--load-format dummy] [--device cuda:0]
        [--size 512x512 --size 1024x1024] [--steps 20] [--true-cfg 4.0] [--guidance 3.5]
        [--frames 81] [--clients 8] [--eager] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import threading
import time
from pathlib import Path
from typing import Any, cast

import torch

from vllm_omni.config.detect import detect
from vllm_omni.config.pipeline import StageKind
from vllm_omni.config.registry import load_pipeline
from vllm_omni.diffusion.engine import DiffusionEngine
from vllm_omni.diffusion.executor.in_process import InProcessExecutor
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.sched.table import ItemTable
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.engine.replica_spec import ReplicaSpec

Figures = dict[str, float]


def load(arguments: argparse.Namespace) -> Worker:
    name = detect(arguments.model)
    assert name is not None, f"{arguments.model} is no diffusers folder"
    stages = load_pipeline(name, arguments.model).stages
    [stage] = [stage for stage in stages if stage.kind is StageKind.DIFFUSION]
    engine_args: dict[str, object] = {
        "load_format": arguments.load_format,
        "enforce_eager": True if arguments.eager else None,
    }
    if not arguments.eager and arguments.device != "cpu":
        engine_args["compile_sizes"] = tuple(arguments.size)
    spec = ReplicaSpec(
        stage=stage.name,
        stage_id=0,
        replica_id=0,
        kind=StageKind.DIFFUSION,
        model_dir=arguments.model,
        model_class=stage.model_class,
        capabilities=stage.capabilities,
        devices=(arguments.device,),
        num_threads=torch.get_num_threads(),
        max_batch_size=arguments.clients,
        start_timeout_s=3600,
        engine_args=engine_args,
    )
    return Worker(spec, lambda what: print(f"{time.perf_counter():8.1f} {what}", flush=True))


def make_request(
    request_id: str, width: int, height: int, arguments: argparse.Namespace, worker: Worker
) -> DiffusionRequest:
    defaults = worker.capabilities.defaults
    return DiffusionRequest(
        request_id=request_id,
        prompt=f"a cat in the snow, number {request_id}",
        negative_prompt="blurry" if arguments.true_cfg else None,
        seed=1,
        num_inference_steps=arguments.steps,
        height=height,
        width=width,
        num_frames=arguments.frames,
        fps=16 if arguments.frames > 1 else None,
        guidance_scale=arguments.guidance or defaults.get("guidance_scale"),  # type: ignore[arg-type]
        true_cfg_scale=arguments.true_cfg,
        max_sequence_length=defaults.get("max_sequence_length"),  # type: ignore[arg-type]
    )


def bare(worker: Worker, request: DiffusionRequest) -> Figures:
    """Diffusers' own pipeline, by its own call."""
    reference = cast(Any, worker.pipeline).reference
    steps: list[float] = []

    def on_step(pipeline: object, step: int, timestep: object, values: dict[str, Any]) -> Any:
        synchronize(request)
        steps.append(time.perf_counter())
        return values

    given = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "true_cfg_scale": request.true_cfg_scale,
        "guidance_scale": request.guidance_scale,
        "num_frames": request.num_frames if request.num_frames > 1 else None,
    }
    synchronize(request)
    began_s = time.perf_counter()
    with torch.inference_mode():
        reference(
            height=request.height,
            width=request.width,
            num_inference_steps=request.num_inference_steps,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            callback_on_step_end=on_step,
            output_type="np",
            **{name: value for name, value in given.items() if value is not None},
        )
    synchronize(request)
    ended_s = time.perf_counter()
    return _figures(began_s, steps, ended_s)


def synchronize(request: object) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _figures(began_s: float, steps: list[float], ended_s: float) -> Figures:
    """The first step's own time is not seen from outside: it is taken as long as the others."""
    per_step_s = (steps[-1] - steps[0]) / max(1, len(steps) - 1)
    return {
        "denoise_s": per_step_s * len(steps),
        "step_ms": per_step_s * 1000,
        "after_s": ended_s - steps[-1],
        "whole_s": ended_s - began_s,
    }


def engine(worker: Worker, requests: list[DiffusionRequest]) -> tuple[Figures, int]:
    """The first request's times, and how many had a part in the largest forward."""
    woken = threading.Event()
    executor = InProcessExecutor(worker.runner, woken.set)
    one = DiffusionEngine(
        "diffusion",
        executor,
        ItemTable(worker.max_batch_size, worker.max_prepared),
        mode=worker.capabilities.mode,
        emits_video=False,
        clock=time.monotonic,
    )
    began_s = time.perf_counter()
    for request in requests:
        one.add(request)
    steps: list[float] = []
    ended_s, largest = began_s, 0
    while len(one):
        stepped = 0
        for output in one.step():
            assert output.failure is None, output.failure
            stepped += output.progress is not None and not output.finished
            if output.request_id == requests[0].request_id:
                if output.finished:
                    ended_s = time.perf_counter()
                elif output.progress is not None:
                    steps.append(time.perf_counter())
        largest = max(largest, stepped)
        if len(one):
            woken.wait()
            woken.clear()
    all_s = time.perf_counter() - began_s
    executor.close()
    return {**_figures(began_s, steps, ended_s), "all_s": all_s}, largest


def measure_size(worker: Worker, size: str, arguments: argparse.Namespace) -> dict[str, Any]:
    width, height = (int(number) for number in size.split("x"))

    def requests(num: int) -> list[DiffusionRequest]:
        return [make_request(str(i), width, height, arguments, worker) for i in range(num)]

    rounds: dict[str, list[Figures]] = {"bare": [], "engine": []}
    bare(worker, requests(1)[0])
    engine(worker, requests(1))
    for _ in range(arguments.rounds):
        rounds["bare"].append(bare(worker, requests(1)[0]))
        rounds["engine"].append(engine(worker, requests(1))[0])
    figures: dict[str, Any] = {
        f"{who}_{name}": statistics.median(one[name] for one in many)
        for who, many in rounds.items()
        for name in ("denoise_s", "step_ms", "after_s", "whole_s")
    }
    engine(worker, requests(arguments.clients))
    together, largest = engine(worker, requests(arguments.clients))
    per_s = arguments.clients / together["all_s"]
    return {
        "size": size,
        **figures,
        "together_per_s": per_s,
        "together_against_one_by_one": per_s * figures["engine_whole_s"],
        "largest_batch": largest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", action="append", help="WIDTHxHEIGHT; may be repeated")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--true-cfg", type=float)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--frames", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    arguments.size = arguments.size or ["512x512"]
    logging.basicConfig(level=logging.WARNING)
    worker = load(arguments)
    results = [measure_size(worker, size, arguments) for size in arguments.size]
    for result in results:
        for name, value in result.items():
            print(f"{name:30} {value if isinstance(value, str) else round(value, 4):>12}")
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    print(f"{'peak_memory_gib':30} {peak:>12.1f}")
    if arguments.json:
        print(json.dumps({"results": results, "peak_memory_gib": peak}))


if __name__ == "__main__":
    main()
