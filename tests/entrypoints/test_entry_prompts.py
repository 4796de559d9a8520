"""A text stage that writes for a picture is told what the picture will be."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from vllm_omni.config.pipeline import (
    Edge,
    Modality,
    PipelineConfig,
    StageConfig,
    StageKind,
    Task,
)
from vllm_omni.diffusion.models.interface import Capabilities, ExecutionMode
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.engine.diffusion_preparer import DiffusionPreparer
from vllm_omni.engine.graph import RoutePlan, compile_plan
from vllm_omni.entrypoints.entry_prompts import EntryPrompts
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams
from vllm_omni.inputs.prompt import OmniPrompt

CAPABILITIES = Capabilities(
    mode=ExecutionMode.STEP,
    params=frozenset(),
    defaults={"num_inference_steps": 4, "height": 64, "width": 64},
)


def ask(rendered: OmniPrompt, request: DiffusionRequest, params: Any) -> tuple[OmniPrompt, Any]:
    own = params.clone()
    own.max_tokens = (request.height or 0) // 16
    return OmniPrompt(text=f"{rendered.text} {request.height}x{request.width}"), own


def pipeline_of(entry_prompt: str | None = f"{__name__}:ask") -> PipelineConfig:
    writer = StageConfig(
        name="writer", kind=StageKind.AUTOREGRESSIVE, accepts=frozenset({Modality.TEXT})
    )
    drawer = StageConfig(name="drawer", kind=StageKind.DIFFUSION, emits=Modality.IMAGE)
    return PipelineConfig(
        model_type="pictures",
        stages=(writer, drawer),
        edges=(Edge(source="writer", target="drawer", bridge="x:y"),),
        entries={Task.IMAGE: "writer"},
        entry_prompt=entry_prompt,
    )


class TextStage:
    """Renders a conversation as its template would."""

    async def render_messages(self, messages: list[dict[str, str]]) -> OmniPrompt:
        return OmniPrompt(text=f"[{messages[0]['content']}]")


def plan_of(pipeline: PipelineConfig) -> RoutePlan:
    return compile_plan(pipeline, Task.IMAGE, frozenset(), frozenset({Modality.IMAGE}))


async def make(
    pipeline: PipelineConfig, prompt: OmniPrompt, asked: OmniDiffusionSamplingParams
) -> tuple[OmniPrompt, tuple[Any, ...]]:
    preparers: Any = [TextStage(), DiffusionPreparer("drawer", CAPABILITIES)]
    params = (SamplingParams(max_tokens=7), asked)
    return await EntryPrompts(pipeline).make("r", plan_of(pipeline), preparers, prompt, params)


async def test_the_prompt_and_its_params_are_made_from_what_is_asked_of_the_picture() -> None:
    asked = OmniDiffusionSamplingParams(height=32, width=96)
    prompt, params = await make(pipeline_of(), OmniPrompt(text="a fox"), asked)

    assert prompt.text == "[a fox] 32x96"
    assert params[0].max_tokens == 2
    assert params[1] is asked


async def test_the_pictures_own_defaults_are_filled_in() -> None:
    prompt, _ = await make(pipeline_of(), OmniPrompt(text="a"), OmniDiffusionSamplingParams())

    assert prompt.text == "[a] 64x64"


async def test_a_pipeline_without_such_a_function_is_left_alone() -> None:
    given = OmniPrompt(text="a")
    prompt, params = await make(pipeline_of(None), given, OmniDiffusionSamplingParams())

    assert prompt is given
    assert params[0].max_tokens == 7


async def test_what_the_picture_cannot_be_is_refused_before_the_text_is_written() -> None:
    with pytest.raises(BadRequestError, match="multiple of 16"):
        await make(
            pipeline_of(),
            OmniPrompt(text="a"),
            OmniDiffusionSamplingParams(height=40, width=64),
        )
