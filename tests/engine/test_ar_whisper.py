"""Speech through an autoregressive replica: a tiny random Whisper, audio in, text out."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from transformers import FeatureExtractionMixin, PreTrainedTokenizerBase, ProcessorMixin
from vllm.config import VllmConfig
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind

from tests.ar_replicas import Requests, greedy, replica, spec_of
from tests.tiny_models import make_tiny_whisper
from vllm_omni.engine.ar_config import build_vllm_config
from vllm_omni.engine.ar_preparer import ArPreparer
from vllm_omni.engine.ar_prompts import PromptProcessor
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import AudioInput, OmniPrompt

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

RATE_HZ = 16_000
DECODER_PROMPT = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asr(model_dir: Path) -> AsyncIterator[Requests]:
    async with replica(model_dir, stage="asr", has_targets=False) as requests:
        yield requests


def noise(seconds: float, seed: int = 0, rate_hz: int = RATE_HZ) -> AudioInput:
    samples = np.random.default_rng(seed).normal(scale=0.1, size=round(seconds * rate_hz))
    return AudioInput(samples.astype(np.float32), rate_hz)


def spoken(**settings: str) -> OmniPrompt:
    return OmniPrompt(audio=(noise(1.0),), extra={"speech_to_text": settings})


def reference_tokens(model_dir: Path, samples: NDArray[np.float32], num_tokens: int) -> list[int]:
    """What transformers writes, greedily."""
    import torch
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    processor = WhisperProcessor.from_pretrained(model_dir)
    model = WhisperForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32)
    features = processor(samples, sampling_rate=RATE_HZ, return_tensors="pt").input_features
    prompt = processor.tokenizer(DECODER_PROMPT, add_special_tokens=False).input_ids
    ids = list(prompt)
    with torch.no_grad():
        encoded = model.model.encoder(features)
        for _ in range(num_tokens):
            decoded = torch.tensor([ids])
            logits = model(encoder_outputs=encoded, decoder_input_ids=decoded).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


async def test_the_transcript_equals_the_reference(asr: Requests, model_dir: Path) -> None:
    audio = noise(2.0)
    output = await asr.run("one", OmniPrompt(audio=(audio,)), greedy(12))

    expected = reference_tokens(model_dir, audio.samples, 12)
    assert list(output.outputs[0].token_ids) == expected


async def test_a_stage_s_own_decoder_prompt_replaces_the_model_class_s(
    asr: Requests, model_dir: Path
) -> None:
    settings = {"speech_to_text": {"decoder_prompt": "<|startoftranscript|><|notimestamps|>"}}
    short = await asr.run("own", OmniPrompt(audio=(noise(2.0),)), greedy(4, extra_args=settings))

    usual = await asr.run("usual", OmniPrompt(audio=(noise(2.0),)), greedy(4))
    assert len(short.prompt_token_ids) == 2
    assert len(usual.prompt_token_ids) == 4


async def test_a_prompt_rendered_by_vllm_s_transcription_is_taken_as_it_is(
    asr: Requests, model_dir: Path
) -> None:
    audio = noise(1.0, 6)
    rendered = {
        "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (audio.samples, RATE_HZ)}},
        "decoder_prompt": {"prompt": DECODER_PROMPT},
    }
    preparer = ArPreparer("asr", build_vllm_config(asr.spec)[0])
    parsed = parse_model_prompt(preparer.model_config, rendered)
    (engine_input,) = await preparer.renderer.render_cmpl_async([parsed])
    prepared = await preparer.prepare("r", OmniPrompt(engine_input=engine_input), greedy(8), {})
    preparer.shutdown()

    theirs = await asr.run("theirs", prepared, greedy(8))
    ours = await asr.run("ours", OmniPrompt(audio=(audio,)), greedy(8))
    assert theirs.outputs[0].token_ids == ours.outputs[0].token_ids


async def test_each_audio_of_a_prompt_has_its_own_output_in_order(asr: Requests) -> None:
    items = (noise(1.0, 1), noise(1.5, 2), noise(0.5, 3))
    alone = [
        await asr.run(f"alone{i}", OmniPrompt(audio=(item,)), greedy(10))
        for i, item in enumerate(items)
    ]
    await asr.submit("together", OmniPrompt(audio=items), greedy(10))
    together = await asr.all("together")

    assert [o.text.outputs[0].token_ids for o in together] == [
        o.outputs[0].token_ids for o in alone
    ]
    assert [o.finished for o in together] == [False, False, True]
    assert all(o.text.finished for o in together)


async def test_long_audio_is_one_output_joined_from_its_clips(asr: Requests) -> None:
    long = noise(40.0, 4)
    whole = await asr.run("long", OmniPrompt(audio=(long,)), greedy(8))
    params = greedy(8, output_kind=RequestOutputKind.DELTA)
    await asr.submit("streamed", OmniPrompt(audio=(long,)), params)
    deltas = await asr.all("streamed")

    assert len(whole.outputs[0].token_ids) == 16
    assert "".join(o.text.outputs[0].text for o in deltas) == whole.outputs[0].text
    assert [o.text.outputs[0].finish_reason for o in deltas[:-1]] == [None] * (len(deltas) - 1)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (OmniPrompt(text="words"), "audio"),
        (OmniPrompt(audio=(AudioInput(np.zeros(0, np.float32), RATE_HZ),)), "audio"),
        (OmniPrompt(audio=(AudioInput(np.full(8000, np.nan, np.float32), RATE_HZ),)), "audio"),
        (OmniPrompt(audio=(AudioInput(np.full(8000, np.inf, np.float32), RATE_HZ),)), "audio"),
        (OmniPrompt(audio=(AudioInput(np.zeros((2, 8000), np.float32), RATE_HZ),)), "audio"),
        (OmniPrompt(audio=(AudioInput(np.zeros(8000, np.float32), 0),)), "audio"),
        (spoken(language="klingon"), "language"),
        (spoken(langauge="en"), "langauge"),
    ],
    ids=["text", "empty", "nan", "inf", "stereo", "rate", "language", "misspelt"],
)
async def test_audio_that_cannot_be_heard_is_refused(
    asr: Requests, prompt: OmniPrompt, field: str
) -> None:
    with pytest.raises(BadRequestError) as refusal:
        await asr.submit("bad", prompt, greedy(4))

    assert refusal.value.field == field


LOADED = (VllmConfig, ProcessorMixin, PreTrainedTokenizerBase, FeatureExtractionMixin)


def num_loaded(model_dir: Path, starts: int) -> int:
    """What is still here of this side of a replica after so many starts and ends."""
    for _ in range(starts):
        config, _ = build_vllm_config(spec_of(model_dir, stage="asr", has_targets=False))
        prompts = PromptProcessor("asr", config)
        prompts.shutdown()
        del config, prompts
    gc.collect()
    return sum(issubclass(type(one), LOADED) for one in gc.get_objects())


async def test_what_was_loaded_for_a_replica_goes_with_it(model_dir: Path) -> None:
    assert num_loaded(model_dir, 3) == num_loaded(model_dir, 1)
