"""A diffusion pipeline without a model: its picture is a function of its request alone.

Prompts begin with words that make it misbehave: `!encode` raises there, `!step3` raises in step 3,
`!batch` raises when it is not alone, `!oom` has memory for one at a time only, `!starved` never
has memory, `!nan` computes no numbers, `!decode` and `!tiles` fail to decode (the latter finds
memory when in tiles), `!still` does not go on, `!hang` waits in its step for ever. `!kept` raises
when the collector of garbage would look through all that was loaded.
"""

from __future__ import annotations

import gc
import hashlib
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_omni.diffusion.models.interface import (
    Capabilities,
    DenoiseState,
    ExecutionMode,
    PipelineComponents,
    PipelineContext,
    ReportStep,
)
from vllm_omni.diffusion.request import DiffusionRequest

CAPABILITIES = Capabilities(
    mode=ExecutionMode.STEP,
    params=frozenset({"negative_prompt", "guidance_scale"}),
    defaults={"num_inference_steps": 4, "height": 32, "width": 32, "guidance_scale": 1.0},
    size_multiple=16,
    max_images=1,
    takes_mask=True,
    has_preview=True,
)


def capabilities(model_dir: Path) -> Capabilities:
    return CAPABILITIES


def whole_capabilities(model_dir: Path) -> Capabilities:
    return replace(CAPABILITIES, mode=ExecutionMode.REQUEST, has_preview=False)


class FakeVae(torch.nn.Module):
    use_tiling = False

    def enable_tiling(self) -> None:
        self.use_tiling = True

    def disable_tiling(self) -> None:
        self.use_tiling = False


def drawn(request: DiffusionRequest, steps: int | None = None) -> NDArray[np.uint8]:
    """The picture of a request after so many steps: what every pipeline here must make."""
    steps = request.num_inference_steps if steps is None else steps
    digest = hashlib.sha256(f"{request.prompt}|{request.seed}".encode()).digest()
    row = np.frombuffer(digest, np.uint8)[: request.width or 32].astype(np.int64)
    values = (np.resize(row, request.width or 32) + 7 * steps) % 256
    shape = request.height or 32, request.width or 32, 3
    return np.broadcast_to(values.astype(np.uint8)[None, :, None], shape).copy()


class StripePipeline:
    """Counts what it is asked for."""

    shares_rows: ClassVar[bool] = False

    def __init__(self, context: PipelineContext | None = None) -> None:
        self.capabilities = CAPABILITIES
        self.vae = FakeVae()
        self.components = PipelineComponents(denoisers={}, vae=self.vae)
        self.batches: list[list[str]] = []
        self.encoded: list[str] = []
        self.on_step: Callable[[Sequence[DenoiseState]], None] = lambda states: None
        self.hang = threading.Event()

    def look_modulations_up(self, max_batch_size: int, max_prepared: int) -> bool:
        return False

    def conditioning_key(self, request: DiffusionRequest) -> Hashable:
        return request.prompt

    def encode(self, requests: Sequence[DiffusionRequest]) -> Sequence[object]:
        self.encoded += [request.prompt for request in requests]
        if any("!encode" in request.prompt for request in requests):
            raise ValueError("cannot encode that")
        return [torch.full((4,), float(len(request.prompt))) for request in requests]

    def conditioning_bytes(self, conditioning: Any) -> int:
        return conditioning.numel() * conditioning.element_size()

    def prepare(self, request: DiffusionRequest, conditioning: object) -> DenoiseState:
        return DenoiseState(request, torch.zeros(1), request.num_inference_steps)

    def batch_key(self, state: DenoiseState) -> Hashable:
        return state.request.height, state.request.width, state.request.quality

    def denoise_step(self, states: Sequence[DenoiseState]) -> None:
        self.batches.append([state.request.request_id for state in states])
        self.on_step(states)
        for state in states:
            self._misbehave(state, len(states))
        for state in states:
            if "!still" not in state.request.prompt:
                state.step_index += 1
                bad = "!nan" in state.request.prompt
                state.latents = state.latents + (float("nan") if bad else 1.0)

    def _misbehave(self, state: DenoiseState, num_states: int) -> None:
        prompt = state.request.prompt
        if f"!step{state.step_index + 1} " in prompt:
            raise ValueError("cannot go on")
        if "!kept" in prompt and not gc.get_freeze_count():
            raise ValueError("nothing is kept")
        if "!batch" in prompt and num_states > 1:
            raise ValueError("not with others")
        if "!starved" in prompt or ("!oom" in prompt and num_states > 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        if "!hang" in prompt:
            self.hang.wait(600)

    def decode(self, states: Sequence[DenoiseState]) -> Sequence[NDArray[np.uint8]]:
        for state in states:
            if "!decode" in state.request.prompt:
                raise ValueError("cannot decode that")
            if "!tiles" in state.request.prompt and not self.vae.use_tiling:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return [drawn(state.request, int(state.latents.item())) for state in states]

    def preview(self, state: DenoiseState) -> NDArray[np.uint8]:
        return drawn(state.request, state.step_index)[:8, :8]


class WholePipeline:
    """Makes a whole request, and reports its steps."""

    shares_rows: ClassVar[bool] = False

    def __init__(self, context: PipelineContext | None = None) -> None:
        self.capabilities = whole_capabilities(Path())
        self.components = PipelineComponents(denoisers={}, vae=FakeVae())
        self.on_step: Callable[[DiffusionRequest, int], None] = lambda request, step: None
        self.steps: list[tuple[str, int]] = []

    def run(self, request: DiffusionRequest, report: ReportStep) -> NDArray[np.uint8] | None:
        for step in range(1, request.num_inference_steps + 1):
            if f"!step{step} " in request.prompt:
                raise ValueError("cannot go on")
            self.on_step(request, step)
            self.steps.append((request.request_id, step))
            if not report(step, request.num_inference_steps):
                return None
        return drawn(request)


class SlowStripePipeline(StripePipeline):
    """A step takes as long as the kernel needs for a millisecond's wait."""

    def denoise_step(self, states: Sequence[DenoiseState]) -> None:
        threading.Event().wait(0.001)
        super().denoise_step(states)


class BrokenPipeline(StripePipeline):
    """Its self-test fails."""

    def denoise_step(self, states: Sequence[DenoiseState]) -> None:
        raise RuntimeError("no kernel image")
