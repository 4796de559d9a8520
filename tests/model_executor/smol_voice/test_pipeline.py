"""A request runs the stages it needs and no others."""

from __future__ import annotations

import importlib

import pytest

from vllm_omni.config.pipeline import Modality, Task, plan_route
from vllm_omni.config.registry import load_pipeline
from vllm_omni.model_executor.models.smol_voice.pipeline import PIPELINE

TEXT, AUDIO = Modality.TEXT, Modality.AUDIO


@pytest.mark.parametrize(
    ("task", "inputs", "outputs", "stages"),
    [
        (Task.CHAT, {TEXT}, {TEXT}, ["thinker"]),
        (Task.CHAT, {TEXT}, {TEXT, AUDIO}, ["thinker", "voice"]),
        (Task.CHAT, {TEXT}, {AUDIO}, ["thinker", "voice"]),
        (Task.CHAT, {TEXT, AUDIO}, {TEXT}, ["asr", "thinker"]),
        (Task.CHAT, {AUDIO}, {TEXT, AUDIO}, ["asr", "thinker", "voice"]),
        (Task.SPEECH, {TEXT}, {AUDIO}, ["voice"]),
        (Task.TRANSCRIPTION, {AUDIO}, {TEXT}, ["asr"]),
    ],
)
def test_routes(
    task: Task, inputs: set[Modality], outputs: set[Modality], stages: list[str]
) -> None:
    route = plan_route(PIPELINE, task, frozenset(inputs), frozenset(outputs))

    assert [PIPELINE.stages[i].name for i in route.stages] == stages


def test_the_registry_knows_the_family() -> None:
    assert load_pipeline("smol_voice") is PIPELINE


def test_every_name_in_the_pipeline_exists() -> None:
    names = [edge.bridge for edge in PIPELINE.edges]
    names += [stage.model_class for stage in PIPELINE.stages if stage.model_class]
    names += [PIPELINE.voices] if PIPELINE.voices else []
    for name in names:
        module, _, attribute = name.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute))
