"""A Piper voice (VITS) on onnxruntime: one piece of text to samples in one forward.

Runs in the replica of a one-shot stage. Nothing here imports torch. What is said is decided by
the text, the voice, the speed and the seed alone: neither by neighbours nor by the cut into
chunks that the text came in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from vllm_omni.errors import BadRequestError, ConfigError
from vllm_omni.generation.model import ModelContext, Work
from vllm_omni.generation.samples import audio_chunk
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.model_executor.models.smol_voice.bridges import load_tokenizer, split_text
from vllm_omni.model_executor.models.smol_voice.phonemes import make_phonemizer, phoneme_ids
from vllm_omni.model_executor.models.smol_voice.voice_graph import NOISE_INPUT
from vllm_omni.outputs.media import AudioChunk

Samples = NDArray[np.float32]

MIN_SPEED: Final = 0.25
MAX_SPEED: Final = 4.0
MAX_PHONEMES: Final = 1024
"""Longest sequence of ids in one forward; what is longer is cut, so that one word without an end
cannot take the memory of the others."""

_NOISE_PER_ID: Final = 2 + 192 * 8
"""Random numbers for one id: 2 for its length, then 192 for each of about 8 frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceSettings:
    """What `voice.json` says (Piper's file, with two optional fields of ours in `inference`)."""

    sample_rate_hz: int
    phoneme_type: str
    espeak_voice: str
    ids_by_phoneme: Mapping[str, Sequence[int]]
    speakers: Mapping[str, int]
    num_speakers: int
    noise_scale: float
    length_scale: float
    noise_w: float
    sentence_silence_s: float
    """Silence between two sentences."""

    @classmethod
    def read(cls, path: Path) -> VoiceSettings:
        """Raises ConfigError when the file is missing or not a voice's settings."""
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            inference = raw.get("inference", {})
            return cls(
                sample_rate_hz=int(raw["audio"]["sample_rate"]),
                phoneme_type=str(raw.get("phoneme_type", "espeak")),
                espeak_voice=str(raw.get("espeak", {}).get("voice", "en-us")),
                ids_by_phoneme=raw["phoneme_id_map"],
                speakers=raw.get("speaker_id_map", {}),
                num_speakers=int(raw.get("num_speakers", 1)),
                noise_scale=float(inference.get("noise_scale", 0.667)),
                length_scale=float(inference.get("length_scale", 1.0)),
                noise_w=float(inference.get("noise_w", 0.8)),
                sentence_silence_s=float(inference.get("sentence_silence_s", 0.2)),
            )
        except OSError as error:
            raise ConfigError(f"cannot read the voice's settings: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is not a voice's settings: {error!r}") from error

    @property
    def voices(self) -> tuple[str, ...]:
        return ("default", *sorted(name for name in self.speakers if name != "default"))

    def speaker_id(self, voice: str) -> int:
        """Raises BadRequestError for a voice that this model does not have."""
        if voice not in self.voices:
            raise BadRequestError(
                f"no voice {voice!r}; this model has: {', '.join(self.voices)}", field="voice"
            )
        return self.speakers.get(voice, 0)


@dataclass(slots=True)
class Speaking:
    """What one request's pieces share."""

    speaker_id: int
    speed: float
    seed: int
    num_pieces: int = 0
    """Pieces spoken so far: each has random numbers of its own."""
    pause_due: bool = False
    """What was said last ended a sentence."""


class PiperVoice:
    """Implements `OneShotModel`."""

    def __init__(self, context: ModelContext) -> None:
        if context.options:
            raise ConfigError(f"the voice has no option {min(context.options)!r}")
        if context.device != "cpu" and not context.device.startswith("cuda"):
            raise ConfigError(f"the voice runs on cpu, not on {context.device!r}")
        self.settings = VoiceSettings.read(context.model_dir / "voice.json")
        self._phonemize = make_phonemizer(self.settings.phoneme_type, self.settings.espeak_voice)
        self._session = _load(context.model_dir / "voice.onnx", context.num_threads)
        self._has_speakers = "sid" in {node.name for node in self._session.get_inputs()}
        self._tokenizer_dir = context.model_dir.parent / "thinker"

    def self_test(self) -> None:
        """Say a word; read the tokenizer of the stage that writes for this one, if it is there."""
        if (self._tokenizer_dir / "tokenizer.json").is_file():
            load_tokenizer(self._tokenizer_dir.resolve())
        state, _ = self.start(None, SpeechParams())
        (result,) = self.forward([Work(state, "Ready.", is_last=True)])
        if not isinstance(result, AudioChunk) or not result.num_samples:
            raise RuntimeError(f"the voice said nothing in its self-test: {result!r}")

    def start(self, prompt: object, params: object) -> tuple[object, list[object]]:
        if params is None:
            params = SpeechParams()
        if not isinstance(params, SpeechParams):
            raise BadRequestError(f"the voice takes SpeechParams, not {type(params).__name__}")
        if not MIN_SPEED <= params.speed <= MAX_SPEED:
            raise BadRequestError(
                f"speed must be from {MIN_SPEED} to {MAX_SPEED}, got {params.speed}", field="speed"
            )
        state = Speaking(
            self.settings.speaker_id(params.voice),
            params.speed,
            # SeedSequence takes no negative numbers; an int64 seed keeps its identity this way.
            (params.seed or 0) & (2**64 - 1),
        )
        return state, split_text(_text_of(prompt))

    def forward(self, batch: Sequence[Work]) -> Sequence[AudioChunk | BaseException | None]:
        """One after the other: a session's threads already share the work of one piece, and a
        shared forward would make a result depend on its neighbours' lengths."""
        return [self._result(work) for work in batch]

    def finish(self, state: object) -> None:
        """Nothing is held outside the state."""

    def _result(self, work: Work) -> AudioChunk | BaseException | None:
        state = cast(Speaking, work.state)
        pause_was_due = state.pause_due
        try:
            result = self._say(state, str(work.item))
        except Exception as error:  # noqa: BLE001 - the boundary of one request in the batch
            state.pause_due = pause_was_due
            return error
        state.num_pieces += 1
        return result

    def _say(self, state: Speaking, text: str) -> AudioChunk | None:
        rate_hz = self.settings.sample_rate_hz
        rng = np.random.default_rng([state.seed, state.num_pieces])
        silence = np.zeros(round(self.settings.sentence_silence_s * rate_hz), dtype=np.float32)
        parts: list[Samples] = []
        for phonemes in self._phonemize(text):
            if not phonemes:
                continue
            if state.pause_due:
                parts.append(silence)
            ids = phoneme_ids(phonemes, self.settings.ids_by_phoneme)
            parts += [
                self._synthesize(ids[first : first + MAX_PHONEMES], state, rng)
                for first in range(0, len(ids), MAX_PHONEMES)
            ]
            state.pause_due = True
        state.pause_due = text.rstrip("\"')").endswith((".", "!", "?", "\u2026"))
        return audio_chunk(np.concatenate(parts), rate_hz) if parts else None

    def _synthesize(self, ids: list[int], state: Speaking, rng: np.random.Generator) -> Samples:
        settings = self.settings
        length_scale = settings.length_scale / state.speed
        num_values = math.ceil(len(ids) * _NOISE_PER_ID * max(1.0, length_scale))
        inputs: dict[str, NDArray[np.generic]] = {
            "input": np.array([ids], dtype=np.int64),
            "input_lengths": np.array([len(ids)], dtype=np.int64),
            "scales": np.array(
                [settings.noise_scale, length_scale, settings.noise_w], dtype=np.float32
            ),
            NOISE_INPUT: rng.standard_normal(num_values, dtype=np.float32),
        }
        if self._has_speakers:
            inputs["sid"] = np.array([state.speaker_id], dtype=np.int64)
        (samples,) = self._session.run(["output"], inputs)
        return cast(Samples, samples.reshape(-1))


def _text_of(prompt: object) -> str:
    """The words of a prompt; nothing for a request that a stream feeds."""
    text = prompt.text if isinstance(prompt, OmniPrompt) else prompt
    if text is None and (prompt is None or isinstance(prompt, OmniPrompt)):
        if isinstance(prompt, OmniPrompt) and (prompt.token_ids or prompt.audio):
            raise BadRequestError("the voice speaks text, nothing else", field="input")
        return ""
    if not isinstance(text, str):
        raise BadRequestError("the voice speaks text, nothing else", field="input")
    return text


def _load(path: Path, num_threads: int) -> Any:
    """The network, with its random numbers as an input."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            "this voice needs onnxruntime: run `pip install 'vllm-omni[demo]'`"
        ) from error
    if not path.is_file():
        raise ConfigError(f"the voice has no network at {path}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    # Threads that wait in a loop for the next piece would keep a core busy while nobody speaks.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime's errors share no base class but this
        raise ConfigError(f"cannot load {path}: {' '.join(str(error).split())[:300]}") from error
    if NOISE_INPUT not in {node.name for node in session.get_inputs()}:
        raise ConfigError(
            f"{path} draws its own random numbers; give it through `with_noise_input` first"
        )
    return session
