"""Prompts of text stages that write for a stage which makes pictures or videos.

The stage that reads the prompt must know what is to be made (its size, say), which are params of
another stage; the family's function puts it in.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, cast

from vllm_omni.config.pipeline import PipelineConfig, StageKind
from vllm_omni.diffusion.checks import make_request
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.engine.diffusion_preparer import DiffusionPreparer
from vllm_omni.engine.graph import RoutePlan
from vllm_omni.engine.stage_client import StagePreparer, TextPreparer
from vllm_omni.entrypoints.stage_params import Params
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams
from vllm_omni.inputs.prompt import OmniPrompt


class EntryPrompt(Protocol):
    """The text stage's prompt and params for one picture or video. Runs in the API process.

    `rendered` is the client's text as the stage's chat template shows it. Raises BadRequestError.
    """

    def __call__(
        self, rendered: OmniPrompt, request: DiffusionRequest, params: Params
    ) -> tuple[OmniPrompt, Params]: ...


class EntryPrompts:
    """Those of one pipeline."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._pipeline = pipeline
        self._function: EntryPrompt | None = None
        if pipeline.entry_prompt is not None:
            module, _, name = pipeline.entry_prompt.partition(":")
            self._function = getattr(importlib.import_module(module), name)

    async def make(
        self,
        request_id: str,
        plan: RoutePlan,
        preparers: Sequence[StagePreparer],
        prompt: OmniPrompt,
        params: Sequence[Params | None],
    ) -> tuple[OmniPrompt, tuple[Params | None, ...]]:
        """Prompt of the entry stage and params of all; both unchanged for other requests.

        Raises:
            BadRequestError: names the field that the stage which makes the picture cannot serve.
        """
        maker = min(plan.emitting)
        is_fed = maker != plan.entry and self._pipeline.stages[maker].kind is StageKind.DIFFUSION
        if self._function is None or not is_fed:
            return prompt, tuple(params)
        asked, own = params[maker], params[plan.entry]
        assert isinstance(asked, OmniDiffusionSamplingParams), "a diffusion stage's params"
        assert own is not None, "the entry stage runs"
        capabilities = cast(DiffusionPreparer, preparers[maker]).capabilities
        request = make_request(request_id, prompt, asked, capabilities)
        if prompt.text is None:
            raise BadRequestError("there is no prompt", field="prompt")
        text_stage = cast(TextPreparer, preparers[plan.entry])
        rendered = await text_stage.render_messages([{"role": "user", "content": prompt.text}])
        entry_prompt, own = self._function(rendered, request, own)
        return entry_prompt, tuple(own if i == plan.entry else p for i, p in enumerate(params))
