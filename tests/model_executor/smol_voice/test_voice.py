"""The voice says the text, the same way each time, whoever else speaks."""

from __future__ import annotations

import json
import shutil
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.engine.bridge import StreamEnd
from vllm_omni.engine.messages import StreamSource
from vllm_omni.errors import BadRequestError, ConfigError
from vllm_omni.generation.model import ModelContext, Work
from vllm_omni.inputs.prompt import AudioInput, OmniPrompt
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.model_executor.models.smol_voice.bridges import SpokenClauses
from vllm_omni.model_executor.models.smol_voice.phonemes import CharacterPhonemizer, phoneme_ids
from vllm_omni.model_executor.models.smol_voice.pipeline import voice_names
from vllm_omni.model_executor.models.smol_voice.voice import PiperVoice
from vllm_omni.outputs.media import AudioChunk

TEXT = "As far as I know, this is it. There is nothing else! Is there?"


def say(voice: PiperVoice, text: str, params: SpeechParams | None = None) -> bytes:
    state, items = voice.start(OmniPrompt(text=text), params)
    audio = b""
    for item in items:
        (chunk,) = voice.forward([Work(state, item, is_last=False)])
        assert isinstance(chunk, AudioChunk)
        audio += chunk.pcm
    voice.finish(state)
    return audio


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 25])
def test_a_streamed_text_sounds_like_the_whole_text(
    voice: PiperVoice, tokenizer_dir: Path, chunk: int
) -> None:
    ids = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json")).encode(TEXT).ids
    context = {"tokenizer_dir": str(tokenizer_dir)}
    bridge = SpokenClauses(StreamSource("s", "thinker", "x:y", context))
    state, _ = voice.start(None, None)
    items: list[object] = []
    for start in range(0, len(ids), chunk):
        payload = memoryview(array("I", ids[start : start + chunk]).tobytes())
        items += bridge.feed(Frame("s", start, payload=payload))
    items += bridge.end(StreamEnd("stop"))

    chunks = [voice.forward([Work(state, item, is_last=False)])[0] for item in items]

    assert b"".join(c.pcm for c in chunks if isinstance(c, AudioChunk)) == say(voice, TEXT)


def test_the_self_test_is_a_real_forward(voice: PiperVoice) -> None:
    voice.self_test()


def test_the_same_request_sounds_the_same(voice: PiperVoice) -> None:
    first = say(voice, TEXT)
    say(voice, "Something else in between.")

    assert say(voice, TEXT) == first
    assert len(first) > 2 * 16_000


def test_a_piece_that_fails_changes_nothing_for_its_neighbours_nor_for_its_second_try(
    voice: PiperVoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["One is here.", "Two is there.", "Three?"]
    alone = [say(voice, text) for text in texts]
    works = [Work(voice.start(None, None)[0], text, is_last=False) for text in texts]
    synthesize = voice._synthesize

    def without_memory(*args: Any) -> Any:
        if args[1] is works[1].state:
            raise MemoryError
        return synthesize(*args)

    monkeypatch.setattr(voice, "_synthesize", without_memory)
    first, failed, third = voice.forward(works)
    monkeypatch.undo()
    (second,) = voice.forward(works[1:2])

    assert isinstance(failed, MemoryError)
    assert [c.pcm for c in (first, second, third) if isinstance(c, AudioChunk)] == alone


def test_the_seed_decides_the_noise(voice: PiperVoice) -> None:
    one, two = SpeechParams(seed=1), SpeechParams(seed=2)

    assert say(voice, TEXT, one) == say(voice, TEXT, one)
    assert say(voice, TEXT, one) != say(voice, TEXT, two)
    assert say(voice, TEXT, SpeechParams(seed=-1)) != say(voice, TEXT, one)


def test_together_equals_alone(voice: PiperVoice) -> None:
    texts = ["One short text.", "Another text that is rather longer than that.", "A third!"]
    alone = [say(voice, text, SpeechParams(seed=i)) for i, text in enumerate(texts)]

    starts = [voice.start(OmniPrompt(text=t), SpeechParams(seed=i)) for i, t in enumerate(texts)]
    works = [Work(state, items[0], is_last=True) for state, items in starts]
    together = [chunk.pcm for chunk in voice.forward(works) if isinstance(chunk, AudioChunk)]

    assert together == alone


def test_a_faster_voice_takes_less_time(voice: PiperVoice) -> None:
    slow, usual, fast = (len(say(voice, TEXT, SpeechParams(speed=s))) for s in (0.5, 1.0, 3.0))

    assert slow > usual > fast


def test_sentences_have_a_silence_between_them(voice: PiperVoice) -> None:
    silence_s = voice.settings.sentence_silence_s
    rate_hz = voice.settings.sample_rate_hz
    state, _ = voice.start(None, None)
    chunks = [voice.forward([Work(state, text, is_last=False)])[0] for text in ("One.", "Two.")]

    first, second = (c.samples() for c in chunks if isinstance(c, AudioChunk))
    silent = round(silence_s * rate_hz)
    assert not second[:silent].any()
    assert second[silent : silent + 100].any()
    assert first[:100].any()


def test_a_clause_goes_on_without_a_silence(voice: PiperVoice) -> None:
    state, _ = voice.start(None, None)
    voice.forward([Work(state, "As far as I know,", is_last=False)])
    (chunk,) = voice.forward([Work(state, "it is.", is_last=False)])

    assert isinstance(chunk, AudioChunk)
    assert chunk.samples()[:100].any()


@pytest.mark.parametrize("text", ["", "  ", "...", "?!", "\U0001f600"])
def test_without_words_there_is_nothing_to_say(voice: PiperVoice, text: str) -> None:
    assert voice.start(OmniPrompt(text=text), SpeechParams())[1] == []


def test_a_stream_brings_its_pieces_later(voice: PiperVoice) -> None:
    assert voice.start(None, SpeechParams())[1] == []


@pytest.mark.parametrize(
    ("params", "field", "says"),
    [
        (SpeechParams(voice="nobody"), "voice", "default"),
        (SpeechParams(speed=0.1), "speed", "0.25"),
        (SpeechParams(speed=9.0), "speed", "4.0"),
        (SpeechParams(speed=float("nan")), "speed", "nan"),
    ],
)
def test_wrong_params_are_refused(
    voice: PiperVoice, params: SpeechParams, field: str, says: str
) -> None:
    with pytest.raises(BadRequestError, match=says) as caught:
        voice.start(OmniPrompt(text="Hello."), params)
    assert caught.value.field == field


def test_only_text_is_spoken(voice: PiperVoice) -> None:
    audio = AudioInput(np.zeros(10, dtype=np.float32), 16_000)
    for prompt in (OmniPrompt(token_ids=[1]), OmniPrompt(audio=(audio,)), 5):
        with pytest.raises(BadRequestError):
            voice.start(prompt, SpeechParams())


def test_a_word_without_an_end_is_spoken_in_parts(voice: PiperVoice) -> None:
    state, _ = voice.start(None, None)
    (chunk,) = voice.forward([Work(state, "a" * 2000, is_last=True)])

    assert isinstance(chunk, AudioChunk)
    assert chunk.num_samples > 2000


def test_characters_that_the_voice_does_not_know_are_left_out(voice: PiperVoice) -> None:
    assert say(voice, "a\u4e2db.") == say(voice, "ab.")


def test_marks_stand_between_phonemes() -> None:
    (phonemes,) = CharacterPhonemizer()("ab")

    ids = phoneme_ids(phonemes, {"^": [1], "$": [2], "_": [0], "a": [10], "b": [11, 12]})

    assert ids == [1, 0, 10, 0, 11, 12, 0, 2]


def test_unknown_options_are_refused(voice_dir: Path) -> None:
    context = ModelContext(model_dir=voice_dir, device="cpu", num_threads=1, options={"pitch": 1.0})

    with pytest.raises(ConfigError, match="pitch"):
        PiperVoice(context)


@pytest.mark.parametrize("name", ["voice.json", "voice.onnx"])
def test_a_missing_file_is_named(voice_dir: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(voice_dir, tmp_path / "voice")
    (tmp_path / "voice" / name).unlink()

    with pytest.raises(ConfigError, match=name):
        PiperVoice(ModelContext(model_dir=tmp_path / "voice", device="cpu", num_threads=1))


@pytest.mark.parametrize("name", ["voice.json", "voice.onnx"])
def test_a_broken_file_is_named(voice_dir: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(voice_dir, tmp_path / "voice")
    (tmp_path / "voice" / name).write_bytes(b"{]")

    with pytest.raises(ConfigError, match=name):
        PiperVoice(ModelContext(model_dir=tmp_path / "voice", device="cpu", num_threads=1))


def test_speakers_are_voices(voice_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(voice_dir, tmp_path / "voice")
    path = tmp_path / "voice" / "voice.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "speaker_id_map": {"tim": 1, "ann": 0}}))

    assert voice_names(tmp_path) == ("default", "ann", "tim")
