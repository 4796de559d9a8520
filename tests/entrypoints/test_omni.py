"""Omni: batches for scripts, over the real threads and fake replicas."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from tests.fakes import (
    FakeLauncher,
    FakeStageClient,
    chain_pipeline,
    failure_output,
    fake_config,
    says,
    speaks,
    text_output,
    voice_pipeline,
)
from vllm_omni.config.deploy import ServerLimits
from vllm_omni.engine.messages import StageOutput, StageRequest
from vllm_omni.entrypoints.omni import Omni
from vllm_omni.errors import (
    BadRequestError,
    ConfigError,
    EngineStoppedError,
    ReplicaDiedError,
    RequestFailedError,
    StageStartError,
)
from vllm_omni.inputs.speech import SpeechParams


def echo(request: StageRequest) -> Iterable[StageOutput]:
    """Answers with the prompt's own words; one prompt is refused."""
    text = request.prompt.text  # type: ignore[attr-defined]
    if text == "poison":
        yield failure_output(request.request_id, "NaN")
    else:
        yield text_output(request.request_id, f"echo {text}", finished=True)


def spoken(limits: ServerLimits | None = None) -> tuple[Omni, list[FakeStageClient]]:
    clients = [FakeStageClient(says("x")), FakeStageClient(echo), FakeStageClient(speaks(3))]
    omni = Omni(
        config=fake_config(voice_pipeline(), limits=limits),
        launcher=FakeLauncher([[client] for client in clients]),
    )
    return omni, clients


def test_a_batch_comes_back_whole_and_in_order() -> None:
    omni, clients = spoken()
    with omni:
        results = omni.generate([f"p{i}" for i in range(50)], use_tqdm=False)
        assert [result.text for result in results] == [f"echo p{i}" for i in range(50)]
        assert all(result.audio and result.audio.num_samples == 720 for result in results)
        assert all(result.finished and result.error is None for result in results)
        assert set(results[0].timings) == {"thinker", "voice"}
        params = clients[1].added[0].params
        assert isinstance(params, SamplingParams)
        assert params.output_kind is RequestOutputKind.FINAL_ONLY


def test_a_failed_prompt_carries_its_error_and_the_others_are_served() -> None:
    omni, _ = spoken()
    with omni:
        results = omni.generate(["a", "poison", "b <|audio|>", "c"], use_tqdm=False)
        assert [result.text for result in results] == ["echo a", "", "", "echo c"]
        assert isinstance(results[1].error, RequestFailedError)
        assert str(results[1].error) == "NaN"
        assert isinstance(results[2].error, BadRequestError)


def test_one_prompt_needs_no_list() -> None:
    omni, _ = spoken()
    with omni:
        assert [r.text for r in omni.generate("one", use_tqdm=False)] == ["echo one"]
        assert [r.text for r in omni.generate({"prompt": "two"}, use_tqdm=False)] == ["echo two"]
        assert omni.generate([], use_tqdm=False) == []
        with pytest.raises(TypeError, match="one prompt or a sequence"):
            omni.generate(3, use_tqdm=False)


def test_choices_are_merged_in_one_result() -> None:
    omni, _ = spoken()
    with omni:
        (result,) = omni.generate(["p"], SamplingParams(n=3), use_tqdm=False)
        assert [(c.index, c.text) for c in result.outputs] == [(i, "echo p") for i in range(3)]
        assert len(result.audios) == 3
        assert result.audio == result.audios[0]


def test_a_list_of_params_is_one_for_each_stage() -> None:
    omni, clients = spoken()
    with omni:
        thinker, voice = SamplingParams(max_tokens=5), SpeechParams(speed=1.5)
        omni.generate(["p"], [None, thinker, voice], use_tqdm=False)
        omni.generate(["p"], sampling_params_list=[None, thinker, voice], use_tqdm=False)
        for request in clients[1].added:
            assert isinstance(request.params, SamplingParams)
            assert request.params.max_tokens == 5
        assert [request.params for request in clients[2].added] == [voice, voice]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"sampling_params_list": 5}, "sampling_params_list"),
        ({"sampling_params_list": "abc"}, "sampling_params_list"),
        ({"sampling_params_list": {"thinker": None}}, "sampling_params_list"),
        ({"output_modalities": 5}, "output_modalities"),
        ({"output_modalities": "audio"}, "output_modalities"),
        ({"task": "sing"}, "task"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(wrong: dict[str, Any], field: str) -> None:
    omni, clients = spoken()
    with omni:
        with pytest.raises(BadRequestError, match=field) as caught:
            omni.generate(["p"], use_tqdm=False, **wrong)
        assert caught.value.field == field
        assert not clients[1].added


def test_only_what_is_wanted_runs() -> None:
    omni, clients = spoken()
    with omni:
        (result,) = omni.generate(["p"], output_modalities=["text"], use_tqdm=False)
        assert (result.text, result.audio) == ("echo p", None)
        assert clients[2].added == []


def test_no_more_run_at_once_than_admission_takes() -> None:
    omni, clients = spoken(ServerLimits(max_in_flight=4))
    most = 0

    def watch(request: StageRequest) -> Iterable[StageOutput]:
        nonlocal most
        most = max(most, omni._admission.in_flight)
        return echo(request)

    clients[1].script = watch
    with omni:
        results = omni.generate([f"p{i}" for i in range(40)], use_tqdm=False)
        assert [result.error for result in results] == [None] * 40
        assert 1 < most <= 4
        pairs = omni.generate(["a", "b", "c"], SamplingParams(n=3), use_tqdm=False)
        assert [len(result.outputs) for result in pairs] == [3, 3, 3]


def test_a_dead_stage_fails_its_requests_and_the_batch_is_returned() -> None:
    omni, clients = spoken()

    def die(request: StageRequest) -> Iterable[StageOutput]:
        clients[2].crash("voice/0 was killed")
        return []

    clients[2].script = die
    with omni:
        results = omni.generate(["a", "b"], use_tqdm=False)
        assert all(result.error is not None for result in results)
        assert isinstance(results[0].error, ReplicaDiedError)
        assert not omni.errored
        assert omni.is_running
        (text,) = omni.generate(["c"], output_modalities=["text"], use_tqdm=False)
        assert text.text == "echo c"
        with pytest.raises(EngineDeadError, match="Stage-2"):
            omni.check_health()


def test_the_death_of_the_engine_is_raised() -> None:
    omni, clients = spoken()

    def fail(request: StageRequest) -> Iterable[StageOutput]:
        clients[1].fail(RuntimeError("a bug"))
        return []

    clients[1].script = fail
    with omni:
        with pytest.raises(EngineStoppedError, match="a bug"):
            omni.generate(["a"], use_tqdm=False)
        omni.engine._thread.join(5)
        assert omni.errored


def test_no_thread_is_left_after_shutdown() -> None:
    before = set(threading.enumerate())
    omni, clients = spoken()
    omni.shutdown()
    omni.shutdown()
    assert set(threading.enumerate()) <= before
    assert [client.shutdown_calls for client in clients] == [1, 1, 1]
    assert not omni.is_running
    with pytest.raises(EngineStoppedError, match="shut down"):
        omni.generate("late", use_tqdm=False)


def test_a_start_that_fails_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    launcher = FakeLauncher([[FakeStageClient()]], start_errors={"s0/0": StageStartError("bad")})
    with pytest.raises(StageStartError, match="bad"):
        Omni(config=fake_config(chain_pipeline(1)), launcher=launcher)
    assert set(threading.enumerate()) <= before


async def test_it_works_inside_a_running_event_loop() -> None:
    omni, _ = spoken()
    with omni:
        assert omni.generate("hi", use_tqdm=False)[0].text == "echo hi"


def test_it_takes_a_model_or_a_config() -> None:
    with pytest.raises(ConfigError, match="either a model or a resolved config"):
        Omni()


def test_it_shows_its_stages() -> None:
    omni, _ = spoken()
    with omni:
        assert repr(omni).startswith("<Omni fake_voice <OmniEngine live")
