from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tests.fakes import voice_pipeline
from vllm_omni.config.pipeline import (
    Edge,
    Modality,
    PipelineConfig,
    StageConfig,
    StageKind,
    Task,
)
from vllm_omni.engine.graph import RoutePlan, compile_plan
from vllm_omni.entrypoints.stage_params import RequestParams, StageParams
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams
from vllm_omni.inputs.speech import SpeechParams

BOTH = frozenset({Modality.TEXT, Modality.AUDIO})


def pipeline_with_defaults() -> PipelineConfig:
    pipeline = voice_pipeline()
    asr, thinker, voice = pipeline.stages
    return dataclasses.replace(
        pipeline,
        stages=(
            asr,
            dataclasses.replace(thinker, default_params={"max_tokens": 77, "temperature": 0.0}),
            dataclasses.replace(voice, default_params={"speed": 1.25}),
        ),
    )


def resolve(
    outputs: frozenset[Modality] = BOTH,
    inputs: frozenset[Modality] = frozenset(),
    task: Task = Task.CHAT,
    **kwargs: object,
) -> RequestParams:
    pipeline = pipeline_with_defaults()
    plan: RoutePlan = compile_plan(pipeline, task, inputs, outputs)
    return StageParams(pipeline).resolve(plan, task, **kwargs)  # type: ignore[arg-type]


def test_defaults_are_the_pipelines() -> None:
    resolved = resolve()
    _, thinker, voice = resolved.by_stage
    assert isinstance(thinker, SamplingParams)
    assert (thinker.max_tokens, thinker.temperature) == (77, 0.0)
    assert voice == SpeechParams(speed=1.25)
    assert resolved.by_stage[0] is None, "a stage that does not run takes none"
    assert (resolved.num_choices, resolved.delta) == (1, False)


def test_the_main_params_are_for_the_stage_that_does_the_task() -> None:
    mine = SamplingParams(max_tokens=3, output_kind=RequestOutputKind.DELTA)
    resolved = resolve(main_params=mine, inputs=frozenset({Modality.AUDIO}))
    asr, thinker, _ = resolved.by_stage
    assert thinker is mine
    assert isinstance(asr, SamplingParams)
    assert asr.max_tokens != 3
    assert asr.output_kind is RequestOutputKind.FINAL_ONLY
    assert resolved.delta


def test_the_list_stands_before_the_main_params() -> None:
    listed = SamplingParams(max_tokens=4)
    resolved = resolve(
        main_params=SamplingParams(max_tokens=3), per_stage=[None, listed, SpeechParams(speed=2.0)]
    )
    assert resolved.by_stage == (None, listed, SpeechParams(speed=2.0))


def test_speech_params_are_for_the_stages_that_speak() -> None:
    assert resolve(speech=SpeechParams(voice="x")).by_stage[2] == SpeechParams(voice="x")
    spoken = resolve(task=Task.SPEECH, main_params=SpeechParams(speed=0.5))
    assert spoken.by_stage == (None, None, SpeechParams(speed=0.5))


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"speed": 99.0}, "speed"),
        ({"speed": float("nan")}, "speed"),
        ({"seed": 2**70}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
    ],
)
def test_impossible_speech_is_refused_whatever_reads_the_prompt(
    wrong: dict[str, Any], name: str
) -> None:
    params = SpeechParams(**wrong)
    with pytest.raises(BadRequestError) as caught:
        resolve(per_stage=[None, None, params])
    assert caught.value.field == f"sampling_params_list[2].{name}"
    with pytest.raises(BadRequestError) as caught:
        resolve(task=Task.SPEECH, main_params=params)
    assert caught.value.field == name


def test_final_only_for_those_who_read_no_stream() -> None:
    mine = SamplingParams(output_kind=RequestOutputKind.DELTA)
    resolved = resolve(main_params=mine, final_only=True)
    thinker = resolved.by_stage[1]
    assert isinstance(thinker, SamplingParams)
    assert thinker.output_kind is RequestOutputKind.FINAL_ONLY
    assert not resolved.delta
    assert mine.output_kind is RequestOutputKind.DELTA


def test_every_choice_has_its_own_seed_in_every_stage() -> None:
    resolved = resolve(main_params=SamplingParams(n=2, seed=5), speech=SpeechParams(seed=9))
    assert resolved.num_choices == 2
    choices = [resolved.of_choice(index) for index in range(2)]
    assert [(thinker.n, thinker.seed, voice.seed) for _, thinker, voice in choices] == [  # type: ignore[union-attr]
        (1, 5, 9),
        (1, 6, 10),
    ]


def test_without_a_seed_choices_have_none() -> None:
    resolved = resolve(main_params=SamplingParams(n=2))
    assert [resolved.of_choice(i)[1].seed for i in range(2)] == [None, None]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"per_stage": [None]}, "sampling_params_list"),
        ({"per_stage": [None, SpeechParams(), None]}, "sampling_params_list[1]"),
        ({"per_stage": [None, None, SamplingParams()]}, "sampling_params_list[2]"),
        ({"main_params": {"max_tokens": 3}}, "sampling_params"),
        (
            {"per_stage": [SamplingParams(n=2), None, None], "inputs": frozenset({Modality.AUDIO})},
            "sampling_params_list[0]",
        ),
    ],
)
def test_params_of_the_wrong_kind_name_their_place(kwargs: dict[str, object], field: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        resolve(**kwargs)  # type: ignore[arg-type]
    assert raised.value.field == field


def test_a_stage_that_speaks_in_tokens_gets_the_voice_and_the_seed() -> None:
    pipeline = pipeline_with_defaults()
    asr, thinker, voice = pipeline.stages
    talking = dataclasses.replace(
        pipeline, stages=(asr, dataclasses.replace(thinker, speaks=True), voice)
    )
    plan = compile_plan(talking, Task.CHAT, frozenset(), BOTH)
    speech = SpeechParams(voice="anna", seed=7)

    params = StageParams(talking)
    by_default = params.resolve(plan, Task.CHAT, speech=speech).by_stage[1]
    own = SamplingParams(seed=1, extra_args={"voice": "bert"})
    by_list = params.resolve(plan, Task.CHAT, per_stage=[None, own, None], speech=speech)

    assert isinstance(by_default, SamplingParams)
    assert (by_default.extra_args, by_default.seed) == ({"voice": "anna"}, 7)
    assert isinstance(by_list.by_stage[1], SamplingParams)
    assert (by_list.by_stage[1].extra_args, by_list.by_stage[1].seed) == ({"voice": "bert"}, 1)
    again = params.resolve(plan, Task.CHAT).by_stage[1]
    assert isinstance(again, SamplingParams)
    assert again.extra_args is None, "nothing of a request stays in the defaults"


def painting_pipeline() -> PipelineConfig:
    """A text stage that writes what a diffusion stage paints."""
    writer = StageConfig(name="writer", kind=StageKind.AUTOREGRESSIVE)
    painter = StageConfig(name="painter", kind=StageKind.DIFFUSION, emits=Modality.IMAGE)
    edge = Edge(source="writer", target="painter", bridge="tests.fakes:join_texts")
    return PipelineConfig(
        model_type="fake_painter",
        stages=(writer, painter),
        edges=(edge,),
        entries={Task.IMAGE: "writer"},
    )


def test_a_pictures_params_are_those_of_the_stage_that_makes_it() -> None:
    pipeline = painting_pipeline()
    plan = compile_plan(pipeline, Task.IMAGE, frozenset(), frozenset())
    asked = OmniDiffusionSamplingParams(seed=5, num_outputs_per_prompt=2, num_inference_steps=3)

    resolved = StageParams(pipeline).resolve(plan, Task.IMAGE, asked)

    assert (plan.entry, plan.emitting) == (0, frozenset({1}))
    assert resolved.num_choices == 2
    writer, painter = resolved.of_choice(1)
    assert isinstance(writer, SamplingParams)
    assert isinstance(painter, OmniDiffusionSamplingParams)
    assert (writer.seed, painter.seed, painter.num_outputs_per_prompt) == (6, 6, 1)


def test_pictures_that_nobody_makes_are_refused() -> None:
    pipeline = dataclasses.replace(painting_pipeline(), edges=())

    with pytest.raises(BadRequestError, match="does not write image"):
        compile_plan(pipeline, Task.IMAGE, frozenset(), frozenset())
