"""From a resolved config to specs and preparers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_omni.config.deploy import ResolvedConfig, ResolvedStage, ServerLimits, StageDeploy
from vllm_omni.config.pipeline import (
    Edge,
    Modality,
    PipelineConfig,
    StageConfig,
    StageKind,
    Task,
)
from vllm_omni.engine.speech_preparer import SpeechPreparer
from vllm_omni.engine.stage_factory import make_preparer, replica_specs, start_replica, voices_of
from vllm_omni.errors import BadRequestError, ConfigError
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.inputs.speech import SpeechParams


def voice_names(model_dir: Path) -> tuple[str, ...]:
    return ("default", model_dir.name)


def config_of(**thinker: Any) -> ResolvedConfig:
    stages = (
        StageConfig(name="thinker", kind=StageKind.AUTOREGRESSIVE, emits=Modality.TEXT),
        StageConfig(
            name="voice", kind=StageKind.ONE_SHOT, emits=Modality.AUDIO, model_class="m:Voice"
        ),
        StageConfig(name="painter", kind=StageKind.DIFFUSION, emits=Modality.IMAGE),
    )
    edge = Edge(source="thinker", target="voice", bridge="m:b", streams=True)
    pipeline = PipelineConfig(
        model_type="test",
        stages=stages,
        edges=(edge,),
        entries={Task.CHAT: "thinker"},
        voices=f"{__name__}:voice_names",
    )
    deploys = (
        StageDeploy(**{"devices": ("cpu",), "num_threads": 2, **thinker}),
        StageDeploy(devices=("cpu",), num_threads=1, max_batch_size=3),
        StageDeploy(devices=("cuda:0,1",), num_threads=1),
    )
    return ResolvedConfig(
        model_dir=Path("/models/alba"),
        pipeline=pipeline,
        stages=tuple(
            ResolvedStage(stage_id=i, config=stage, deploy=deploy, model_dir=Path("/models") / name)
            for i, (stage, deploy, name) in enumerate(zip(stages, deploys, "abc", strict=True))
        ),
        limits=ServerLimits(max_speech_chars=10),
    )


def test_every_replica_of_every_stage_has_a_spec() -> None:
    arguments = {"dtype": "float32"}
    specs = replica_specs(config_of(num_replicas=2, devices=("cpu", "cpu"), engine_args=arguments))

    assert [spec.name for spec in specs] == ["thinker/0", "thinker/1", "voice/0", "painter/0"]
    assert [spec.stage_id for spec in specs] == [0, 0, 1, 2]
    assert specs[1].engine_args == arguments
    assert (specs[0].num_threads, specs[2].max_batch_size) == (2, 3)
    assert specs[3].devices == ("cuda:0", "cuda:1")


def test_data_planes_are_opened_where_a_stream_begins_or_ends() -> None:
    thinker, voice, painter = replica_specs(config_of())

    assert (thinker.has_sources, thinker.has_targets) == (False, True)
    assert (voice.has_sources, voice.has_targets) == (True, False)
    assert (painter.has_sources, painter.has_targets) == (False, False)


async def test_a_diffusion_stage_without_capabilities_says_so() -> None:
    config = config_of()
    with pytest.raises(ConfigError, match="painter"):
        await start_replica(replica_specs(config)[2])
    with pytest.raises(ConfigError, match="painter"):
        make_preparer(config.stages[2], config)


def test_a_speaking_stage_knows_the_checkpoint_s_voices() -> None:
    config = config_of()

    assert voices_of(config) == ("default", "alba")
    assert isinstance(make_preparer(config.stages[1], config), SpeechPreparer)


@pytest.fixture
def voice() -> SpeechPreparer:
    return SpeechPreparer("voice", ("default", "alba"), max_chars=10)


async def test_a_text_goes_on_as_it_is(voice: SpeechPreparer) -> None:
    prompt = OmniPrompt(text="Good day.")

    assert await voice.prepare("r", prompt, SpeechParams(voice="alba", speed=4.0), {}) is prompt
    assert voice.source_context(SpeechParams()) == {}


@pytest.mark.parametrize(
    ("prompt", "params", "options", "field"),
    [
        (OmniPrompt(), SpeechParams(), {}, "input"),
        (OmniPrompt(text=" \n"), SpeechParams(), {}, "input"),
        (OmniPrompt(text="x" * 11), SpeechParams(), {}, "input"),
        (OmniPrompt(text="x"), SpeechParams(voice="bob"), {}, "voice"),
        (OmniPrompt(text="x"), SpeechParams(speed=0.2), {}, "speed"),
        (OmniPrompt(text="x"), SpeechParams(speed=4.5), {}, "speed"),
        (OmniPrompt(text="x"), SpeechParams(speed=float("nan")), {}, "speed"),
        (OmniPrompt(text="x"), SpeechParams(seed=2**63), {}, "seed"),
        (OmniPrompt(text="x"), object(), {}, "sampling_params"),
        (OmniPrompt(text="x"), SpeechParams(), {"priority": 1}, "priority"),
    ],
)
async def test_what_cannot_be_spoken_names_its_field(
    voice: SpeechPreparer, prompt: OmniPrompt, params: object, options: Any, field: str
) -> None:
    with pytest.raises(BadRequestError) as refusal:
        await voice.prepare("r", prompt, params, options)

    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("device", "env"), [("cuda:0", {"CUDA_MPS_CLIENT_PRIORITY": "1"}), ("cpu", {})]
)
def test_a_stage_that_yields_its_device_is_a_client_of_low_priority(
    device: str, env: dict[str, str]
) -> None:
    config = config_of(devices=(device,), yields_device=True)
    yielding, other, _ = replica_specs(config)

    assert (yielding.env, other.env) == (env, {})
