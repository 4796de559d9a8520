"""What the server itself adds to a picture: from the HTTP request to the last byte of the PNG.

A real server with a pipeline that costs nothing: it has one picture, and gives it to everyone. What
is measured is all that is not encoding, denoising and decoding: HTTP, admission, the way to the
replica and back, the steps' decisions and reports, the file, its base64.

    python benchmarks/picture_share.py [--size 1024x1024] [--steps 20] [--requests 30] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.served import Server, cpu_seconds, serve
from vllm_omni.config.registry import ENTRY_POINT_GROUP
from vllm_omni.diffusion.models.interface import (
    Capabilities,
    DenoiseState,
    ExecutionMode,
    PipelineComponents,
    PipelineContext,
)
from vllm_omni.diffusion.models.topology import one_stage
from vllm_omni.diffusion.request import DiffusionRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

GOAL_MS = 30
NAME = "ReadyPictures"
CAPABILITIES = Capabilities(
    mode=ExecutionMode.STEP,
    params=frozenset(),
    defaults={"num_inference_steps": 20, "height": 1024, "width": 1024},
)


def capabilities(model_dir: Path) -> Capabilities:
    return CAPABILITIES


PIPELINE = one_stage(
    NAME,
    model_class=f"benchmarks.picture_share:{NAME}",
    capabilities="benchmarks.picture_share:capabilities",
)


class ReadyPictures:
    """See `StepPipeline`."""

    def __init__(self, context: PipelineContext) -> None:
        self.capabilities = CAPABILITIES
        self.components = PipelineComponents(denoisers={})
        self._pixels: dict[tuple[int, int], NDArray[np.uint8]] = {}

    def look_modulations_up(self, max_batch_size: int, max_prepared: int) -> bool:
        return False

    def conditioning_key(self, request: DiffusionRequest) -> Hashable:
        return request.prompt

    def encode(self, requests: Sequence[DiffusionRequest]) -> Sequence[object]:
        return [None for _ in requests]

    def conditioning_bytes(self, conditioning: object) -> int:
        return 0

    def prepare(self, request: DiffusionRequest, conditioning: object) -> DenoiseState:
        import torch

        return DenoiseState(request, torch.zeros(1), request.num_inference_steps)

    def batch_key(self, state: DenoiseState) -> Hashable:
        return state.request.height, state.request.width

    def denoise_step(self, states: Sequence[DenoiseState]) -> None:
        for state in states:
            state.step_index += 1

    def decode(self, states: Sequence[DenoiseState]) -> Sequence[NDArray[np.uint8]]:
        return [
            self._picture(state.request.height or 0, state.request.width or 0) for state in states
        ]

    def preview(self, state: DenoiseState) -> None:
        return None

    def _picture(self, height: int, width: int) -> NDArray[np.uint8]:
        """Patches of all sizes, some noise: about as hard to pack as a photograph."""
        if (height, width) not in self._pixels:
            from PIL import Image

            random = np.random.default_rng(0)
            sums = random.normal(0, 4, (height, width, 3))
            for side in (4, 16, 64, 256):
                patches = random.integers(0, 256, (side, side, 3), dtype=np.uint8)
                sums += np.asarray(Image.fromarray(patches).resize((width, height))) / side**0.5
            span = sums.max() - sums.min()
            self._pixels[height, width] = ((sums - sums.min()) / span * 255).astype(np.uint8)
        return self._pixels[height, width]


def write_model(folder: Path) -> Path:
    """A checkpoint without weights, and beside it what registers its pipeline."""
    model = folder / "model"
    (model / "transformer").mkdir(parents=True)
    (model / "model_index.json").write_text(json.dumps({"_class_name": NAME}))
    (model / "transformer" / "weights.bin").write_bytes(b"none")
    info = folder / "ready_pictures-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ready-pictures\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\n{NAME} = benchmarks.picture_share:PIPELINE\n"
    )
    return model


def measure(size: str, steps: int, requests: int) -> dict[str, Any]:
    body = {"prompt": "a fox", "size": size, "seed": 1, "num_inference_steps": steps}
    times_ms = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder)
        paths = [str(folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        env = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        with (
            serve(model, folder / "server.log", [], env=env) as server,
            httpx.Client(base_url=server.url, timeout=60) as client,
        ):
            for i in range(requests + 3):
                if i == 3:
                    used_s = server_cpu_s(server)
                began_s = time.perf_counter()
                answer = client.post("/v1/images/generations", json=body)
                times_ms.append((time.perf_counter() - began_s) * 1000)
                answer.raise_for_status()
            used_s = server_cpu_s(server) - used_s
    warm_ms = sorted(times_ms[3:])
    return {
        "size": size,
        "steps": steps,
        "share_ms": round(statistics.median(warm_ms), 1),
        "share_ms_min": round(warm_ms[0], 1),
        "share_ms_max": round(warm_ms[-1], 1),
        "cpu_ms": round(used_s / requests * 1000, 1),
    }


def server_cpu_s(server: Server) -> float:
    """Of all its processes; what they are all together busy with does not depend on the load."""
    return sum(map(cpu_seconds, server.processes()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1024x1024")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    figures = measure(arguments.size, arguments.steps, arguments.requests)
    for name, value in figures.items():
        goal = f"<= {GOAL_MS}" if name == "share_ms" else ""
        print(f"{name:20} {value:>12}   {goal}")
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
