"""The orchestrator's side of a diffusion replica: speaks `diffusion.wire` with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from vllm_omni.config.pipeline import StageKind
from vllm_omni.diffusion import wire
from vllm_omni.diffusion.checks import load_capabilities, make_request
from vllm_omni.diffusion.models.interface import Capabilities, ExecutionMode
from vllm_omni.diffusion.proc import run_diffusion
from vllm_omni.engine.diffusion_ranks import run_diffusion_ranks
from vllm_omni.engine.messages import StageOutput, StageRequest
from vllm_omni.engine.process_child import ChildMain
from vllm_omni.engine.process_client import ProcessClient
from vllm_omni.errors import BadRequestError, ConfigError
from vllm_omni.generation.wire import RawFrame, UtilityResult
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams
from vllm_omni.inputs.prompt import OmniPrompt


class DiffusionClient(ProcessClient):
    """See `StageClient`. Made by `start`."""

    kind = StageKind.DIFFUSION
    target = staticmethod(run_diffusion)

    capabilities: Capabilities

    async def _start(self) -> None:
        # In a thread: for a model of none of our families it imports libraries.
        self.capabilities = await asyncio.to_thread(
            load_capabilities, self._spec.capabilities, self._spec.model_dir, self._spec.stage
        )
        if len(self._spec.devices) > 1 and self.capabilities.mode is ExecutionMode.REQUEST:
            raise ConfigError(
                f"stages.{self._spec.stage}.devices: this model runs whole requests here, on one "
                f"device, not on {', '.join(self._spec.devices)}"
            )
        await super()._start()

    def _target(self) -> ChildMain:
        return run_diffusion if len(self._spec.devices) == 1 else run_diffusion_ranks

    def _pack(self, request: StageRequest) -> list[RawFrame]:
        params, prompt = request.params, request.prompt
        if not isinstance(prompt, OmniPrompt):
            raise BadRequestError(f"stage {self._spec.stage} takes one prompt")
        if not isinstance(params, OmniDiffusionSamplingParams):
            raise BadRequestError(
                f"stage {self._spec.stage} takes OmniDiffusionSamplingParams, got "
                f"{type(params).__name__}"
            )
        if request.targets or request.sources:
            raise BadRequestError(f"stage {self._spec.stage} neither reads nor writes streams")
        remaining_s = None
        if request.deadline_s is not None:
            remaining_s = request.deadline_s - time.monotonic()
        made = make_request(request.request_id, prompt, params, self.capabilities)
        return wire.pack_add(made, remaining_s, params.preview_interval)

    def _unpack(self, frames: Sequence[memoryview]) -> Sequence[StageOutput] | UtilityResult:
        report = wire.decode_report(frames[0])
        if isinstance(report, UtilityResult):
            return report
        try:
            return wire.unpack_outputs(report, frames)
        except ValueError as error:
            raise msgspec.DecodeError(str(error)) from error
