"""The vocoder against transformers' decode of the same codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from tests.generation.bench import FakeReceiver
from tests.parity.vocoders import Codes, Samples, context, difference, save_part, speak
from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.engine.messages import StageOutput, StreamSource
from vllm_omni.generation.engine import OneShotEngine
from vllm_omni.generation.model import Work
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.model_executor.models.common.code_stream import END_OF_CODES
from vllm_omni.model_executor.models.common.tiny_checkpoint import merged, seeded, spread_weights
from vllm_omni.model_executor.models.qwen3_omni.code2wav import Code2Wav
from vllm_omni.model_executor.models.qwen3_omni.code2wav_stream import StreamingCode2Wav
from vllm_omni.model_executor.models.qwen3_omni.released import RELEASED
from vllm_omni.model_executor.models.qwen3_omni.tiny import TINY

BRIDGE = "vllm_omni.model_executor.models.common.code_stream:CodeFrames"
SEEDS = (0, 1, 2)
RAMPS = ([1], [2], [3], [7], [25], [1, 2, 4, 8])
NUM_FRAMES = 40
"""Several times the window of the attention."""


class Voice:
    """A checkpoint and the reference with its weights."""

    def __init__(self, model_dir: Path, seed: int) -> None:
        self.model_dir = model_dir
        config = Qwen3OmniMoeConfig(**merged(RELEASED, TINY))
        with seeded(seed):
            self.reference = Qwen3OmniMoeCode2Wav(config.code2wav_config).eval()
            spread_weights(self.reference, gain=0.7)
        save_part(model_dir, self.reference, "code2wav", config)
        self.rng = np.random.default_rng(seed)

    def codes(self, num_frames: int) -> Codes:
        return self.rng.integers(0, 2048, (num_frames, 16), dtype=np.int32)

    @torch.inference_mode()
    def decoded(self, codes: Codes) -> Samples:
        given = torch.from_numpy(codes.T[None].astype(np.int64))
        samples: Samples = self.reference.chunked_decode(given)[0, 0].numpy()
        return samples

    def model(self, ramp: list[int]) -> Code2Wav:
        return Code2Wav(context(self.model_dir, chunk_ramp=ramp))


@pytest.fixture(scope="module", params=SEEDS)
def voice(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Voice:
    return Voice(tmp_path_factory.mktemp("voice"), request.param)


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_speech_in_chunks_is_the_references(voice: Voice, ramp: list[int]) -> None:
    codes = voice.codes(NUM_FRAMES)
    (said,) = speak(voice.model(ramp), [codes])
    reference = voice.decoded(codes)
    assert reference.std() > 0.01, "the reference is silent"
    assert difference(said, reference) < 1e-4


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
@torch.inference_mode()
def test_the_joined_stream_is_the_offline_decode_sample_for_sample(
    voice: Voice, ramp: list[int]
) -> None:
    codes = torch.from_numpy(voice.codes(NUM_FRAMES).T[None].astype(np.int64))
    whole = voice.reference(codes)[:, 0]
    model = Qwen3OmniMoeCode2Wav(voice.reference.config).eval()
    model.load_state_dict(voice.reference.state_dict())
    decoder = StreamingCode2Wav(model)
    past: Any = None
    parts, position, index = [], 0, 0
    while position < NUM_FRAMES:
        size = ramp[min(index, len(ramp) - 1)]
        chunk = codes[..., position : position + size]
        wave, past = decoder.decode(chunk, past, torch.tensor([position]))
        parts.append(wave)
        position, index = position + chunk.shape[-1], index + 1
    assert difference(torch.cat(parts, dim=1).numpy(), whole.numpy()) < 1e-5


def test_many_requests_together_say_what_each_says_alone(voice: Voice) -> None:
    all_codes = [voice.codes(n) for n in (1, 2, 5, 9, 17, 23, 30, 40)]
    together = speak(voice.model([1, 2, 4, 8]), all_codes)
    for codes, said in zip(all_codes, together, strict=True):
        (alone,) = speak(voice.model([1, 2, 4, 8]), [codes])
        assert difference(said, alone) < 1e-4
        assert difference(said, voice.decoded(codes)) < 1e-4


@pytest.fixture(scope="module")
def first_voice(tmp_path_factory: pytest.TempPathFactory) -> Voice:
    return Voice(tmp_path_factory.mktemp("voice"), 7)


def test_codes_that_come_at_once_are_said_as_one_by_one(first_voice: Voice) -> None:
    codes = first_voice.codes(21)
    model = first_voice.model([1, 2, 4, 8])
    state, _ = model.start(None, None)
    results = [
        *model.forward([Work(state, codes, is_last=False)]),
        *model.forward([Work(state, END_OF_CODES, is_last=True)]),
    ]
    said = np.concatenate([r.samples() for r in results])  # type: ignore[union-attr]
    assert difference(said, first_voice.decoded(codes)) < 1e-4


def test_long_speech_has_no_seams(first_voice: Voice) -> None:
    """The reference decodes 300 frames at a time and loses samples between; ours loses none."""
    codes = first_voice.codes(330)
    (said,) = speak(first_voice.model([8, 64]), [codes])
    given = torch.from_numpy(codes.T[None].astype(np.int64))
    with torch.inference_mode():
        whole = first_voice.reference(given)[0, 0].numpy()
    assert difference(said, whole) < 1e-4


def test_no_codes_no_sound(first_voice: Voice) -> None:
    (said,) = speak(first_voice.model([1, 2]), [np.empty((0, 16), dtype=np.int32)])
    assert not len(said)


def test_a_request_that_leaves_in_the_middle_disturbs_nobody(first_voice: Voice) -> None:
    codes = first_voice.codes(12)
    model = first_voice.model([2])
    leaving, _ = model.start(None, None)
    for step in range(5):
        model.forward([Work(leaving, codes[step : step + 1], is_last=False)])
    model.finish(leaving)

    (said,) = speak(model, [codes])

    assert difference(said, first_voice.decoded(codes)) < 1e-4


@pytest.mark.parametrize("code", [-1, 2048])
def test_codes_without_an_entry_fail_their_request_alone(first_voice: Voice, code: int) -> None:
    model = first_voice.model([1])
    good, bad = (model.start(None, None)[0] for _ in range(2))
    wrong = first_voice.codes(1)
    wrong[0, 3] = code
    works = [
        Work(good, first_voice.codes(1), is_last=False),
        Work(bad, wrong, is_last=False),
    ]
    said, failed = model.forward(works)
    assert not isinstance(said, BaseException)
    assert isinstance(failed, ValueError)


def test_an_input_that_failed_is_taken_again(
    first_voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = first_voice.codes(6)
    model = first_voice.model([2])
    state, _ = model.start(None, None)
    said: list[Samples] = []
    decode = StreamingCode2Wav.decode

    def without_memory(*args: Any) -> Any:
        decode(*args)
        raise torch.OutOfMemoryError("no memory")

    for step in range(6):
        work = Work(state, codes[step : step + 1], is_last=step == 5)
        if step == 3:
            with monkeypatch.context() as patched:
                patched.setattr(StreamingCode2Wav, "decode", without_memory)
                with pytest.raises(torch.OutOfMemoryError):
                    model.forward([work])
        (result,) = model.forward([work])
        if result is not None:
            said.append(result.samples())  # type: ignore[union-attr]
    assert difference(np.concatenate(said), first_voice.decoded(codes)) < 1e-4


class Served:
    """The vocoder in the one-shot engine, fed by streams that the test writes."""

    def __init__(self, voice: Voice) -> None:
        self.model = voice.model([1, 2, 4])
        self.receiver = FakeReceiver()
        self.engine = OneShotEngine(
            "code2wav", self.model, 8, receiver=self.receiver, clock=lambda: 0.0, wake=int
        )

    def listen(self, request: str) -> None:
        source = StreamSource(request, "talker", BRIDGE)
        self.engine.add(request, None, SpeechParams(), [source])

    def write(self, request: str, codes: Codes) -> None:
        for frame in codes:
            meta = {"kind": "codes", "groups": len(frame)}
            payload = memoryview(frame.astype("<i4").tobytes())
            self.receiver.handlers[request](Frame(request, 0, meta, payload))

    def outputs(self) -> list[StageOutput]:
        found: list[StageOutput] = []
        while self.engine.has_work:
            found += self.engine.step()
        return found


def _samples(outputs: list[StageOutput], request: str) -> Samples:
    parts = [o.audio.samples() for o in outputs if o.request_id == request and o.audio is not None]
    return np.concatenate(parts)


def test_a_stream_becomes_speech_and_ends_with_it(first_voice: Voice) -> None:
    served, codes = Served(first_voice), first_voice.codes(9)
    served.listen("a")
    served.write("a", codes[:4])
    early = served.outputs()
    assert [output.audio is not None for output in early] == [True, True]

    served.write("a", codes[4:])
    served.receiver.end("a", "length")
    outputs = early + served.outputs()

    assert difference(_samples(outputs, "a"), first_voice.decoded(codes)) < 1e-4
    assert [output.finished for output in outputs] == [False, False, False, True]


def test_an_empty_stream_ends_without_sound(first_voice: Voice) -> None:
    served = Served(first_voice)
    served.listen("a")
    served.receiver.end("a")
    (output,) = served.outputs()
    assert output.finished
    assert (output.audio, output.failure) == (None, None)


def test_a_talker_that_fails_takes_its_request_and_no_other(first_voice: Voice) -> None:
    served, codes = Served(first_voice), first_voice.codes(7)
    for request in ("good", "bad", "gone"):
        served.listen(request)
        served.write(request, codes[:3])
    outputs = served.outputs()
    served.receiver.end("bad", "error", "the talker broke")
    served.engine.abort(["gone"])
    served.write("good", codes[3:])
    served.receiver.end("good")
    outputs += served.outputs()

    (failed,) = [output for output in outputs if output.failure is not None]
    assert failed.request_id == "bad"
    assert "the talker broke" in failed.failure.message  # type: ignore[union-attr]
    assert difference(_samples(outputs, "good"), first_voice.decoded(codes)) < 1e-4
    assert "0 of" in repr(served.model.states)
