"""The orchestrator's side of a one-shot replica: speaks `generation.wire` with it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm_omni.config.pipeline import StageKind
from vllm_omni.engine.messages import StageOutput, StageRequest
from vllm_omni.engine.process_client import ProcessClient
from vllm_omni.errors import BadRequestError
from vllm_omni.generation import wire
from vllm_omni.generation.proc import run_one_shot
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.inputs.speech import SpeechParams


class OneShotClient(ProcessClient):
    """See `StageClient`. Made by `start`."""

    kind = StageKind.ONE_SHOT
    target = staticmethod(run_one_shot)

    def _pack(self, request: StageRequest) -> list[wire.RawFrame]:
        prompt: wire.PromptData | None = None
        frames: list[wire.RawFrame] = []
        if isinstance(request.prompt, OmniPrompt):
            prompt, frames = wire.pack_prompt(request.prompt)
        elif request.prompt is not None:
            raise BadRequestError(f"stage {self._spec.stage} takes one prompt")
        if request.params is not None and not isinstance(request.params, SpeechParams):
            raise BadRequestError(
                f"stage {self._spec.stage} takes SpeechParams, got {type(request.params).__name__}"
            )
        if request.targets:
            raise BadRequestError(f"stage {self._spec.stage} does not stream into other stages")
        remaining_s = None
        if request.deadline_s is not None:
            remaining_s = request.deadline_s - time.monotonic()
        add = wire.Add(
            request.request_id, prompt, request.params, list(request.sources), remaining_s
        )
        return [wire.encode(add), *frames]

    def _unpack(self, frames: Sequence[memoryview]) -> Sequence[StageOutput] | wire.UtilityResult:
        report = wire.decode_report(frames[0])
        if isinstance(report, wire.UtilityResult):
            return report
        return wire.unpack_outputs(report, frames)
