"""One diffusion replica on one device and on several: what sharing out the rows of a step gives.

For each list of devices a replica is started, in the processes that it has in a server, and asked
for one picture with guidance and for several at once. Reported are the time of a denoise step and
of a whole picture alone, and pictures per second together.

    python benchmarks/diffusion_ranks.py MODEL --devices cuda:0 --devices cuda:0,1
        [--load-format dummy] [--size 1024x1024] [--steps 20] [--scale 4.0] [--clients 8]
        [--eager] [--rounds 3] [--json]

`--scale` is the model's guidance: `true_cfg_scale` where it has that, else `guidance_scale`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_omni.config.detect import detect
from vllm_omni.config.pipeline import StageKind
from vllm_omni.config.placement import split_devices
from vllm_omni.config.registry import load_pipeline
from vllm_omni.engine.diffusion_client import DiffusionClient
from vllm_omni.engine.messages import StageRequest
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams
from vllm_omni.inputs.prompt import OmniPrompt

Figures = dict[str, float]


def spec_of(arguments: argparse.Namespace, devices: tuple[str, ...]) -> ReplicaSpec:
    name = detect(arguments.model)
    assert name is not None, f"{arguments.model} is no diffusers folder"
    stages = load_pipeline(name, arguments.model).stages
    [stage] = [stage for stage in stages if stage.kind is StageKind.DIFFUSION]
    options: dict[str, object] = {"load_format": arguments.load_format}
    if arguments.eager:
        options["enforce_eager"] = True
    elif devices[0] != "cpu":
        options["compile_sizes"] = (arguments.size,)
    return ReplicaSpec(
        stage=stage.name,
        stage_id=0,
        replica_id=0,
        kind=StageKind.DIFFUSION,
        model_dir=arguments.model,
        model_class=stage.model_class,
        capabilities=stage.capabilities,
        devices=devices,
        num_threads=max(1, len(os.sched_getaffinity(0)) // 2),
        max_batch_size=arguments.clients,
        start_timeout_s=3600,
        engine_args=options,
    )


def request_of(
    name: str, seed: int, arguments: argparse.Namespace, client: DiffusionClient
) -> StageRequest:
    width, height = map(int, arguments.size.split("x"))
    known = client.capabilities.params
    fields: dict[str, Any] = {
        "true_cfg_scale" if "true_cfg_scale" in known else "guidance_scale": arguments.scale
    }
    if "negative_prompt" in known:
        fields["negative_prompt"] = "blurry"
    params = OmniDiffusionSamplingParams(
        seed=seed, num_inference_steps=arguments.steps, width=width, height=height, **fields
    )
    return StageRequest(name, 0, OmniPrompt(text=f"a cat in the snow, number {seed}"), params)


async def together_s(
    client: DiffusionClient, requests: Sequence[StageRequest]
) -> tuple[float, float]:
    """Seconds of the whole, and of a step between the first and the last that was reported."""
    began_s = time.perf_counter()
    for request in requests:
        await client.add_request_async(request)
    left, steps_s = len(requests), list[float]()
    while left:
        for output in await client.get_outputs_async():
            assert output.failure is None, output.failure
            if output.progress is not None and not output.finished:
                steps_s.append(time.perf_counter())
            left -= output.finished
    return time.perf_counter() - began_s, (steps_s[-1] - steps_s[0]) / (len(steps_s) - 1)


async def measured(arguments: argparse.Namespace, devices: tuple[str, ...]) -> Figures:
    began_s = time.perf_counter()
    client = await DiffusionClient.start(spec_of(arguments, devices))
    try:
        start_s = time.perf_counter() - began_s
        names = [f"r{i}" for i in range(arguments.rounds + 1)]
        alone = [
            await together_s(client, [request_of(name, i, arguments, client)])
            for i, name in enumerate(names)
        ][1:]
        many = [
            request_of(f"m{i}", 100 + i, arguments, client) for i in range(2 * arguments.clients)
        ]
        all_s, _ = await together_s(client, many)
    finally:
        await client.shutdown_async(10.0)
    return {
        "start_s": start_s,
        "step_ms": statistics.median(step_s for _, step_s in alone) * 1000,
        "picture_s": statistics.median(whole_s for whole_s, _ in alone),
        "pictures_per_s": len(many) / all_s,
    }


async def run(arguments: argparse.Namespace) -> dict[str, Figures]:
    figures = {}
    for devices in arguments.devices:
        figures[devices] = await measured(arguments, split_devices(devices))
        shown = ", ".join(f"{name} {value:.3g}" for name, value in figures[devices].items())
        print(f"{devices}: {shown}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--devices", action="append", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--size", default="1024x1024")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--scale", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = asyncio.run(run(arguments))
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
