"""The vocoder against transformers' networks, run chunk by chunk on the same codes and noise.

transformers decodes an utterance as a whole only. Its networks see two blocks back and one ahead,
so a chunk is decoded from such a window; the whole of an utterance that fits in one window must be
what transformers' own call gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5OmniConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from tests.parity.qwen2_5_omni.reference import BLOCK, noise_of, spoken_at_once
from tests.parity.vocoders import Codes, Samples, context, difference, save_part, speak
from vllm_omni.errors import BadRequestError
from vllm_omni.generation.model import Work
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.model_executor.models.common.code_stream import END_OF_CODES
from vllm_omni.model_executor.models.common.tiny_checkpoint import merged, seeded, spread_weights
from vllm_omni.model_executor.models.qwen2_5_omni.released import RELEASED
from vllm_omni.model_executor.models.qwen2_5_omni.tiny import TINY, write_speakers
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav import MEL_CONTEXT, Token2Wav

SEEDS = (0, 1, 2)
RAMPS = ([1], [2], [3], [7], [25], [24, 36])
NUM_STEPS = 3
"""Of the flow; the released model takes 10. Fewer make these tests quick and no less strict."""
HOP = 240


class Voice:
    """A checkpoint and the reference with its weights."""

    def __init__(self, model_dir: Path, seed: int) -> None:
        self.model_dir = model_dir
        config = Qwen2_5OmniConfig(**merged(RELEASED, TINY))
        with seeded(seed):
            self.reference = Qwen2_5OmniToken2WavModel(config.token2wav_config).eval()
            spread_weights(self.reference.code2wav_dit_model)
            spread_weights(self.reference.code2wav_bigvgan_model, gain=0.8)
            write_speakers(model_dir, config, mel_frames=40)
        save_part(model_dir, self.reference, "token2wav", config)
        self.speakers = torch.load(model_dir / "spk_dict.pt", weights_only=True)
        self.rng = np.random.default_rng(seed)

    def model(self, ramp: list[int]) -> Token2Wav:
        return Token2Wav(context(self.model_dir, chunk_ramp=ramp, num_steps=NUM_STEPS))

    def codes(self, number: int) -> Codes:
        return self.rng.integers(0, 8192, (number, 1), dtype=np.int32)

    def mel(self, codes: Codes, seed: int, voice: str, first: int, end: int) -> torch.Tensor:
        """transformers' mel frames of a window of codes, from the request's noise."""
        noise = noise_of(seed, len(codes))[2 * first : 2 * end]
        speaker = self.speakers[voice]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch, "randn", lambda *_, **__: torch.from_numpy(noise[None].copy()))
            mel: torch.Tensor = self.reference.code2wav_dit_model.sample(
                speaker["cond"],
                speaker["ref_mel"],
                torch.from_numpy(codes[first:end, 0].astype(np.int64))[None],
                num_steps=NUM_STEPS,
            )
        return mel

    @torch.inference_mode()
    def in_chunks(self, codes: Codes, ramp: list[int], seed: int, voice: str) -> Samples:
        """Every chunk's mel frames from a window of its own; then the sound of all that are `MEL_
        CONTEXT` frames away from the end, and at the end of the rest."""
        num, begin, spoken, index = len(codes), 0, 0, 0
        mel = torch.empty(1, 80, 0)
        parts: list[Samples] = []
        while begin < num:
            end = min(num, begin + ramp[min(index, len(ramp) - 1)])
            first = max(0, begin // BLOCK * BLOCK - 2 * BLOCK)
            window = self.mel(codes, seed, voice, first, min(num, end + BLOCK))
            mel = torch.cat([mel, window[..., 2 * (begin - first) : 2 * (end - first)]], dim=-1)
            due = mel.shape[-1] - (0 if end == num else MEL_CONTEXT)
            if due > spoken:
                left = max(0, spoken - MEL_CONTEXT)
                wave = self.reference.code2wav_bigvgan_model(mel[..., left:]).numpy().reshape(-1)
                parts.append(wave[(spoken - left) * HOP : (due - left) * HOP])
                spoken = due
            begin, index = end, index + 1
        return np.concatenate(parts)


@pytest.fixture(scope="module", params=SEEDS)
def voice(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Voice:
    return Voice(tmp_path_factory.mktemp("voice"), request.param)


@pytest.fixture(scope="module")
def first_voice(tmp_path_factory: pytest.TempPathFactory) -> Voice:
    return Voice(tmp_path_factory.mktemp("voice"), 7)


@pytest.mark.parametrize("number", [1, 20])
def test_a_short_utterance_is_transformers_own_call(voice: Voice, number: int) -> None:
    codes = voice.codes(number)
    (said,) = speak(voice.model([24, 36]), [codes], [SpeechParams(voice="Ethan", seed=5)])
    speaker = voice.speakers["Ethan"]
    whole = spoken_at_once(voice.reference, codes, speaker, seed=5, num_steps=NUM_STEPS)
    assert whole.std() > 0.01, "the reference is silent"
    assert difference(said, whole) < 1e-4


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_speech_in_chunks_is_the_references_in_chunks(voice: Voice, ramp: list[int]) -> None:
    codes = voice.codes(40 if ramp[0] < 7 else 75)  # at 36 the window leaves the beginning behind
    (said,) = speak(voice.model(ramp), [codes], [SpeechParams(voice="Chelsie", seed=3)])
    assert difference(said, voice.in_chunks(codes, ramp, 3, "Chelsie")) < 1e-4


def test_many_requests_together_say_what_each_says_alone(voice: Voice) -> None:
    all_codes = [voice.codes(n) for n in (1, 2, 13, 25, 30, 37, 37, 61)]
    voices = ("Chelsie", "Ethan")
    params = [SpeechParams(voice=voices[i % 2], seed=i) for i in range(len(all_codes))]
    model = voice.model([24, 36])
    together = speak(model, all_codes, params)
    for i, (codes, said) in enumerate(zip(all_codes, together, strict=True)):
        (alone,) = speak(model, [codes], [params[i]])
        assert difference(said, alone) < 1e-4
        assert difference(said, voice.in_chunks(codes, [24, 36], i, voices[i % 2])) < 1e-4


def test_no_codes_no_sound(first_voice: Voice) -> None:
    (said,) = speak(first_voice.model([24]), [np.empty((0, 1), dtype=np.int32)])
    assert not len(said)


def test_seed_and_voice_decide_what_is_heard(first_voice: Voice) -> None:
    model, codes = first_voice.model([24]), first_voice.codes(14)
    params = [
        SpeechParams(seed=1),
        SpeechParams(seed=1, voice="chelsie"),
        SpeechParams(seed=2),
        SpeechParams(seed=1, voice="Ethan"),
    ]
    first, same, other_seed, other_voice = speak(model, [codes] * 4, params)
    assert difference(first, same) < 1e-4
    assert difference(first, other_seed) > 1e-3
    assert difference(first, other_voice) > 1e-3


def test_marks_of_the_talker_are_read_as_code_0(first_voice: Voice) -> None:
    codes = first_voice.codes(14)
    marked, plain = codes.copy(), codes.copy()
    marked[5], plain[5] = 8296, 0
    model = first_voice.model([24])
    said, expected = speak(model, [marked, plain])
    assert difference(said, expected) < 1e-4


def test_an_input_that_failed_is_taken_again(
    first_voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, model = first_voice.codes(40), first_voice.model([12])
    state, _ = model.start(None, SpeechParams(seed=4, voice="Chelsie"))
    said: list[Samples] = []

    def without_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    for step in range(40):
        work = Work(state, codes[step : step + 1], is_last=False)
        if step == 35:
            with monkeypatch.context() as patched:
                patched.setattr(model, "_speak", without_memory)
                with pytest.raises(torch.OutOfMemoryError):
                    model.forward([work])
        said += [r.samples() for r in model.forward([work]) if r is not None]  # type: ignore[union-attr]
    (last,) = model.forward([Work(state, END_OF_CODES, is_last=True)])
    said.append(last.samples())  # type: ignore[union-attr]
    expected = first_voice.in_chunks(codes, [12], 4, "Chelsie")
    assert difference(np.concatenate(said), expected) < 1e-4


def test_an_unknown_voice_is_refused_with_the_list(first_voice: Voice) -> None:
    with pytest.raises(BadRequestError, match="Chelsie"):
        first_voice.model([24]).start(None, SpeechParams(voice="nobody"))


def test_the_self_test_speaks(first_voice: Voice) -> None:
    first_voice.model([1, 24]).self_test()
