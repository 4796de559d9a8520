"""Requests through AsyncOmni, the real orchestrator thread and fake replicas."""

from __future__ import annotations

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tests.entrypoints.voice_rig import DELTA, collect, samples_of, text_of, voice
from tests.fakes import (
    eventually,
    says,
)
from vllm_omni.config.pipeline import Task
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.inputs.speech import SpeechParams


async def test_text_and_audio_arrive_and_only_the_last_output_is_the_end() -> None:
    async with voice() as stages:
        outputs = await collect(stages.omni.generate("hi", DELTA, "mine"))
        assert text_of(outputs) == "It is a test."
        assert samples_of(outputs) == 480
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert {output.request_id for output in outputs} == {"mine"}
        assert {output.stage for output in outputs} == {"thinker", "voice"}
        timings = outputs[-1].timings
        assert set(timings) == {"thinker", "voice"}
        assert all(one.finished_s is not None and one.submitted_s >= 0 for one in timings.values())
        assert stages.asr.added == []
        await eventually(lambda: stages.is_clean)


async def test_text_alone_runs_the_thinker_alone() -> None:
    async with voice() as stages:
        outputs = await collect(stages.omni.generate("hi", DELTA, output_modalities=["text"]))
        assert text_of(outputs) == "It is a test."
        assert stages.voice.added == []
        assert stages.thinker.added[0].targets == ()


async def test_audio_alone_carries_no_text() -> None:
    async with voice() as stages:
        outputs = await collect(stages.omni.generate("hi", DELTA, output_modalities=["audio"]))
        assert (text_of(outputs), samples_of(outputs)) == ("", 480)
        params = stages.thinker.added[0].params
        assert isinstance(params, SamplingParams)
        assert params.output_kind is RequestOutputKind.FINAL_ONLY
        assert DELTA.output_kind is RequestOutputKind.DELTA, "the caller's params are not touched"


async def test_speech_and_transcription_enter_at_their_own_stage() -> None:
    async with voice() as stages:
        spoken = await collect(
            stages.omni.generate("Hello.", task=Task.SPEECH, speech=SpeechParams(speed=2.0))
        )
        assert samples_of(spoken) == 480
        assert stages.voice.added[0].params == SpeechParams(speed=2.0)
        audio = {"multi_modal_data": {"audio": (np.zeros(1600, np.float32), 16000)}}
        words = await collect(stages.omni.generate(audio, DELTA, task=Task.TRANSCRIPTION))
        assert text_of(words) == "what is this"
        assert stages.thinker.added == []


async def test_audio_in_goes_through_recognition_first() -> None:
    async with voice() as stages:
        prompt = {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Answer: "},
                        {"type": "audio", "audio": (np.zeros(16000, np.float32), 16000)},
                    ],
                }
            ]
        }
        outputs = await collect(stages.omni.generate(prompt, DELTA, output_modalities=["text"]))
        assert text_of(outputs) == "It is a test."
        (prepared,) = stages.preparers["asr"].prepared
        assert prepared.text == "Answer: <|audio|>"
        assert len(prepared.audio) == 1
        assert stages.thinker.added[0].prompt == OmniPrompt(text="what is this")


async def test_several_choices_each_have_their_text_audio_and_seed() -> None:
    async with voice() as stages:
        params = SamplingParams(n=3, seed=10, output_kind=RequestOutputKind.DELTA)
        outputs = await collect(stages.omni.generate("hi", params))
        for index in range(3):
            assert text_of(outputs, index) == "It is a test."
            assert samples_of(outputs, index) == 480
        assert [output.finished for output in outputs].count(True) == 1
        assert outputs[-1].finished
        given = [request.params for request in stages.thinker.added]
        assert [(one.n, one.seed) for one in given] == [(1, 10), (1, 11), (1, 12)]
        completions = {c.index for output in outputs for c in output.outputs}
        assert completions == {0, 1, 2}
        assert len({request.request_id for request in stages.thinker.added}) == 3
        await eventually(lambda: stages.is_clean)


@pytest.mark.parametrize(
    ("kind", "last"),
    [(RequestOutputKind.CUMULATIVE, "ab"), (RequestOutputKind.FINAL_ONLY, "ab")],
)
async def test_text_follows_its_output_kind(kind: RequestOutputKind, last: str) -> None:
    async with voice() as stages:
        stages.thinker.script = says("a", "ab")
        params = SamplingParams(output_kind=kind)
        outputs = await collect(stages.omni.generate("hi", params, output_modalities=["text"]))
        assert outputs[-1].text == last


async def test_a_streaming_stage_gets_the_context_of_its_source() -> None:
    async with voice() as stages:
        await collect(stages.omni.generate("hi", DELTA))
        (source,) = stages.voice.added[0].sources
        assert source.context == {"params": "SamplingParams"}
