"""Params of every stage of a request: what the user gave, else the pipeline's defaults."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import msgspec
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_omni.config.pipeline import (
    MADE_BY,
    Modality,
    PipelineConfig,
    StageConfig,
    StageKind,
    Task,
)
from vllm_omni.core.conditioning import VOICE_KEY
from vllm_omni.engine.graph import RoutePlan
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams
from vllm_omni.inputs.speech import SpeechParams, check_speech

Params: TypeAlias = SamplingParams | SpeechParams | OmniDiffusionSamplingParams

_PARAMS_TYPE: Final[dict[StageKind, type]] = {
    StageKind.AUTOREGRESSIVE: SamplingParams,
    StageKind.ONE_SHOT: SpeechParams,
    StageKind.DIFFUSION: OmniDiffusionSamplingParams,
}


@dataclass(frozen=True, slots=True)
class RequestParams:
    """One client request's params, resolved."""

    by_stage: tuple[Params | None, ...]
    """By stage id; None for stages that do not run."""
    num_choices: int
    delta: bool
    """The text that goes to the client arrives as deltas."""

    def of_choice(self, index: int) -> tuple[Params | None, ...]:
        """Params of one of several choices: its own seed, and one choice only."""
        if self.num_choices == 1:
            return self.by_stage
        return tuple(_of_choice(params, index) for params in self.by_stage)


def num_choices_of(params: object) -> int:
    """How many answers params ask for."""
    if isinstance(params, SamplingParams):
        return params.n
    if isinstance(params, OmniDiffusionSamplingParams):
        return params.num_outputs_per_prompt
    return 1


class StageParams:
    """Resolves params for one pipeline. The defaults are made once."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._pipeline = pipeline
        self._defaults = [_default(stage) for stage in pipeline.stages]
        self._main = {task: pipeline.stage_id(name) for task, name in pipeline.entries.items()}

    def resolve(
        self,
        plan: RoutePlan,
        task: Task,
        main_params: object = None,
        per_stage: Sequence[object] | None = None,
        speech: SpeechParams | None = None,
        *,
        final_only: bool = False,
    ) -> RequestParams:
        """Params for every stage of a plan.

        Args:
            main_params: for the stage that does the task.
            per_stage: one entry for each stage of the pipeline, None for the default; stands
                before `main_params`.
            speech: for the stages that speak.
            final_only: no text is read while it is written.

        Raises:
            BadRequestError: wrong number or type of params.
        """
        num_stages = len(self._pipeline.stages)
        if per_stage is not None and len(per_stage) != num_stages:
            raise BadRequestError(
                f"this pipeline has {num_stages} stages, got params for {len(per_stage)}",
                field="sampling_params_list",
            )
        resolved: list[Params | None] = [None] * num_stages
        num_choices, delta = 1, False
        # A picture's params are those of the stage that makes it, whoever reads the prompt.
        main = min(plan.emitting) if task in MADE_BY else self._main[task]
        for stage_id, stage in plan.stages.items():
            given = per_stage[stage_id] if per_stage is not None else None
            field = f"sampling_params_list[{stage_id}]"
            if given is None and stage_id == main and main_params is not None:
                given, field = main_params, "sampling_params"
            params = self._params_of(stage_id, given, field, speech)
            if stage_id == main:
                num_choices = num_choices_of(params)
            elif num_choices_of(params) != 1:
                raise BadRequestError(f"stage {stage.name!r} makes one choice", field=field)
            if isinstance(params, SamplingParams):
                if final_only or not stage.emits:
                    params = _final_only(params)
                elif self._pipeline.stages[stage_id].emits is Modality.TEXT:
                    delta = params.output_kind is RequestOutputKind.DELTA
            resolved[stage_id] = params
        return RequestParams(_with_seed_of(resolved[main], resolved), num_choices, delta)

    def _params_of(
        self, stage_id: int, given: object, field: str, speech: SpeechParams | None
    ) -> Params:
        stage = self._pipeline.stages[stage_id]
        expected = _PARAMS_TYPE[stage.kind]
        if given is None:
            if speech is not None and expected is SpeechParams:
                return speech
            given = self._defaults[stage_id]
        if not isinstance(given, expected):
            raise BadRequestError(
                f"stage {stage.name!r} takes {expected.__name__}, not {type(given).__name__}",
                field=field,
            )
        if isinstance(given, SpeechParams):
            check_speech(given, "" if field == "sampling_params" else field)
        if speech is not None and stage.speaks and isinstance(given, SamplingParams):
            return _spoken(given, speech)
        return given


def _spoken(params: SamplingParams, speech: SpeechParams) -> SamplingParams:
    """Params of a stage that makes speech out of tokens, with the voice and seed of a request."""
    own = copy.copy(params)
    own.extra_args = {VOICE_KEY: speech.voice, **(params.extra_args or {})}
    if own.seed is None:
        own.seed = speech.seed
    return own


def _default(stage: StageConfig) -> Params:
    return _PARAMS_TYPE[stage.kind](**stage.default_params)


def _final_only(params: SamplingParams) -> SamplingParams:
    """Nobody reads this stage's text while it is written."""
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        return params
    params = copy.copy(params)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _with_seed_of(asked: Params | None, resolved: list[Params | None]) -> tuple[Params | None, ...]:
    """A picture's seed is that of the text stages that lead to it, unless they have their own."""
    if not isinstance(asked, OmniDiffusionSamplingParams) or asked.seed is None:
        return tuple(resolved)
    seeded = list(resolved)
    for i, params in enumerate(seeded):
        if isinstance(params, SamplingParams) and params.seed is None:
            seeded[i] = own = copy.copy(params)
            own.seed = asked.seed
    return tuple(seeded)


def _of_choice(params: Params | None, index: int) -> Params | None:
    if params is None:
        return None
    seed = params.seed + index if params.seed is not None else None
    if isinstance(params, SpeechParams):
        return msgspec.structs.replace(params, seed=seed)
    if isinstance(params, OmniDiffusionSamplingParams):
        return replace(params, seed=seed, num_outputs_per_prompt=1)
    own = copy.copy(params)
    own.n, own.seed = 1, seed
    return own
