"""A real, tiny one-shot model: every word becomes a tone whose pitch and length the word decides.

A word that begins with `!` is an order: `!raise` fails alone, `!batch` fails the forward it is in,
`!nan` makes bad samples, `!die` ends the process, `!sleep=0.5` takes time, `!nothing` gives no
audio. `!memory=2` finds no memory in a forward of more than two, `!memory=0` in none; after
`!broken` nothing finds any.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.engine.bridge import StreamEnd
from vllm_omni.engine.messages import StreamSource
from vllm_omni.errors import BadRequestError, ConfigError
from vllm_omni.generation.model import ModelContext, Work
from vllm_omni.generation.samples import audio_chunk
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.outputs.media import AudioChunk

SAMPLE_RATE_HZ = 8000
_OPTIONS = {"load", "load_s", "self_test", "tell"}


@dataclass
class ToneState:
    speed: float
    phase: float = 0.0
    """Where the last tone ended: a request's audio has no click between words."""
    words: list[str] = field(default_factory=list)


class ToneModel:
    """See `OneShotModel`."""

    live_states = 0

    def __init__(self, context: ModelContext) -> None:
        if unknown := set(context.options) - _OPTIONS:
            raise ConfigError(f"unknown option {sorted(unknown)[0]!r}")
        self._options = context.options
        self._is_broken = False
        if "tell" in context.options:
            with open(str(context.options["tell"]), "w") as file:
                file.write("loading")
        match context.options.get("load"):
            case "fail":
                raise OSError("no weights in\nthis folder")
            case "hang":
                signal.pause()
            case "work":
                _burn(float(str(context.options["load_s"])))

    def self_test(self) -> None:
        if self._options.get("self_test") == "fail":
            raise RuntimeError("the self-test gave silence")
        state, words = self.start(OmniPrompt(text="ready"), None)
        self.forward([Work(state, words[0], is_last=True)])
        self.finish(state)

    def start(self, prompt: object, params: object) -> tuple[object, list[object]]:
        type(self).live_states += 1
        words: list[object] = []
        if isinstance(prompt, OmniPrompt):
            if prompt.text is None:
                raise BadRequestError("a text is needed", field="input")
            words = list(prompt.text.split())
        return ToneState(params.speed if isinstance(params, SpeechParams) else 1.0), words

    def forward(self, batch: Sequence[Work]) -> Sequence[AudioChunk | BaseException | None]:
        words = [str(work.item) for work in batch]
        if len(batch) > 1 and "!batch" in words:
            raise RuntimeError("this batch does not run")
        self._is_broken = self._is_broken or "!broken" in words
        rooms = [int(w.partition("=")[2]) for w in words if w.startswith("!memory=")]
        if self._is_broken or any(len(batch) > room for room in rooms):
            raise MemoryError(f"no room for {len(batch)}")
        return [self._one(work) for work in batch]

    def finish(self, state: object) -> None:
        type(self).live_states -= 1

    def _one(self, work: Work) -> AudioChunk | BaseException | None:
        state, word = work.state, str(work.item)
        assert isinstance(state, ToneState)
        state.words.append(word)
        order, _, value = word.partition("=")
        match order:
            case "!raise":
                return ValueError(f"cannot say {word}")
            case "!die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "!sleep":
                time.sleep(float(value))
            case "!nothing":
                return None
        samples = tone(word, state)
        if order == "!nan":
            samples[0] = np.nan
        try:
            return audio_chunk(samples, SAMPLE_RATE_HZ)
        except RuntimeError as error:
            return error


def tone(word: str, state: ToneState) -> np.ndarray:
    """The samples of one word; moves the state's phase on."""
    pitch_hz = 200 + zlib.crc32(word.encode()) % 400
    num_samples = int(80 * len(word) / state.speed)
    phases = state.phase + 2 * np.pi * pitch_hz / SAMPLE_RATE_HZ * np.arange(1, num_samples + 1)
    state.phase = float(phases[-1])
    return 0.5 * np.sin(phases)


def spoken(text: str, speed: float = 1.0) -> bytes:
    """What the model says for a text, computed here."""
    state = ToneState(speed)
    return b"".join(audio_chunk(tone(w, state), SAMPLE_RATE_HZ).pcm for w in text.split())


class WordBridge:
    """Bytes of a text, cut anywhere, to whole words."""

    def __init__(self, source: StreamSource) -> None:
        self._rest = ""

    def feed(self, frame: Frame) -> list[object]:
        text = bytes(frame.payload).decode()
        if text == "!bridge":
            raise ValueError("this bridge does not take that")
        *words, self._rest = (self._rest + text).split(" ")
        return [word for word in words if word]

    def end(self, end: StreamEnd) -> list[object]:
        return [self._rest] if self._rest else []


def _burn(seconds: float) -> None:
    """Load: CPU time in small portions, like a loader that waits for its disk."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        busy_until = time.process_time() + 0.02
        while time.process_time() < busy_until:
            pass
        time.sleep(0.02)
