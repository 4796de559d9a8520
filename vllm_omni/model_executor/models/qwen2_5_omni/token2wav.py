"""The vocoder as a model of the one-shot engine: codes in, 24 kHz out, a window for each chunk.

Requests whose windows have the same length share a forward. The waveform network looks
`MEL_CONTEXT` mel frames to both sides, so the last of them wait for the next chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from vllm_omni.errors import BadRequestError, ConfigError
from vllm_omni.generation.model import ModelContext, Work
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.model_executor.models.common.code_stream import (
    END_OF_CODES,
    Chunk,
    ChunkRamp,
    CodeBuffer,
    Codes,
)
from vllm_omni.model_executor.models.common.part_weights import load_part
from vllm_omni.model_executor.models.common.speakers import voice_id
from vllm_omni.model_executor.models.common.vocoder import (
    Samples,
    VocoderOptions,
    audio_of,
    read_part_config,
    speech_params,
)
from vllm_omni.model_executor.models.common.voice_file import load_voices
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav_stream import (
    MelSampler,
    Speaker,
    WaveDecoder,
)
from vllm_omni.outputs.media import AudioChunk

DEFAULT_VOICE: Final = "Chelsie"

MEL_CONTEXT: Final = 20
"""Mel frames that the waveform network sees on either side of those it is asked for: what the
released streaming decoder gives it."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Progress:
    """How far a request is. Never changed: a chunk that fails is begun again from here."""

    buffer: CodeBuffer = field(default_factory=CodeBuffer)
    num_decoded: int = 0
    """Codes whose mel frames are there."""
    codes: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """The last decoded codes: as many as a window reaches back."""
    mel: Tensor | None = None
    """The last mel frames `[1, M, C]`: those not spoken yet, and `MEL_CONTEXT` before them."""
    num_waiting: int = 0
    """How many of them were not spoken yet."""


@dataclass(slots=True, eq=False)
class Utterance:
    """One request."""

    speaker: Speaker
    seed: int
    progress: Progress


@dataclass(slots=True, eq=False)
class _Turn:
    """One request in one forward."""

    state: Utterance
    chunks: list[Chunk]
    progress: Progress
    samples: list[Samples] = field(default_factory=list)


class Token2Wav:
    """Implements `OneShotModel`."""

    def __init__(self, context: ModelContext) -> None:
        torch.set_num_threads(context.num_threads)
        options = VocoderOptions.read(context, more=("num_steps",))
        self._ramp = options.ramp
        self._device, self._dtype = options.device, options.dtype
        config = read_part_config(context.model_dir, "token2wav_config")
        config._attn_implementation = "sdpa"
        model = load_part(
            lambda: Qwen2_5OmniToken2WavModel(config),
            context.model_dir,
            "token2wav.",
            dtype=options.dtype,
            device=options.device,
            random=options.has_random_weights,
        )
        self._mel = MelSampler(model.code2wav_dit_model, _num_steps(options.more))
        self._wave = WaveDecoder(model)
        self._mel_dim = int(config.dit_config.mel_dim)
        self._codebook_size = int(config.dit_config.num_embeds)
        with torch.inference_mode():
            self._speakers = self._read_speakers(context.model_dir / "spk_dict.pt")

    def self_test(self) -> None:
        """Decode two chunks of every size that requests will have, and the end."""
        for size in sorted(set(self._ramp.sizes)):
            state, _ = self.start(None, None)
            ramp, self._ramp = self._ramp, ChunkRamp((size,))
            try:
                codes = np.zeros((2 * size + self._mel.block_codes, 1), dtype=np.int32)
                results = [
                    *self.forward([Work(state, codes, is_last=False)]),
                    *self.forward([Work(state, END_OF_CODES, is_last=True)]),
                ]
            finally:
                self._ramp = ramp
            if not isinstance(results[-1], AudioChunk):
                raise RuntimeError(f"the vocoder gave no sound in its self-test: {results!r}")

    def start(self, prompt: object, params: object) -> tuple[object, list[object]]:
        wanted: SpeechParams = speech_params(prompt, params)
        names = {name: i for i, name in enumerate(self._speakers)}
        try:
            index = voice_id(names, wanted.voice, DEFAULT_VOICE)
        except ValueError as error:
            raise BadRequestError(str(error), field="voice") from error
        speaker = list(self._speakers.values())[index]
        # SeedSequence takes no negative numbers; an int64 seed keeps its identity this way.
        return Utterance(speaker, (wanted.seed or 0) & (2**64 - 1), Progress()), []

    def forward(self, batch: Sequence[Work]) -> Sequence[AudioChunk | BaseException | None]:
        turns = [self._turn(work) for work in batch]
        with torch.inference_mode():
            for nth in range(max((len(turn.chunks) for turn in turns), default=0)):
                self._decode([(t, t.chunks[nth]) for t in turns if nth < len(t.chunks)])
        for turn in turns:
            turn.state.progress = turn.progress
        return [audio_of(turn.samples) for turn in turns]

    def finish(self, state: object) -> None:
        """Nothing is held outside the state."""

    def _turn(self, work: Work) -> _Turn:
        state = cast(Utterance, work.state)
        progress = state.progress
        item = work.item
        if item is not END_OF_CODES:
            # A talker may write one of its marks; the released decoder reads it as code 0.
            codes = cast(Codes, item)
            is_code = (codes >= 0) & (codes <= self._codebook_size)
            item = np.where(is_code, codes, 0).astype(np.int32)
        chunks, buffer = progress.buffer.take(item, self._ramp, self._mel.block_codes)
        return _Turn(state, chunks, replace(progress, buffer=buffer))

    def _decode(self, work: Sequence[tuple[_Turn, Chunk]]) -> None:
        """One chunk of every turn: its mel frames, then the sound of those that can be spoken."""
        windows = [(turn, chunk, self._window(turn.progress, chunk)) for turn, chunk in work]
        for group in _grouped(windows, lambda part: len(part[2])):
            mel_BMC = self._sample([turn for turn, _, _ in group], [w for _, _, w in group])
            for (turn, chunk, window), mel_MC in zip(group, mel_BMC, strict=True):
                before = len(window) - len(chunk.codes)
                turn.progress = self._with_mel(turn.progress, chunk, window, before, mel_MC)
        spoken = [
            (turn, *span)
            for turn, chunk in work
            if (span := _span(turn.progress, chunk.is_last)) is not None
        ]
        for speaking in _grouped(spoken, lambda part: cast(Tensor, part[0].progress.mel).shape[1]):
            self._speak(speaking)

    def _window(self, progress: Progress, chunk: Chunk) -> NDArray[np.int32]:
        """The codes that the chunk's mel frames are made of."""
        num_before = progress.num_decoded - self._mel.window_start(progress.num_decoded)
        before = progress.codes[len(progress.codes) - num_before :]
        return np.concatenate([before, chunk.codes[:, 0]])

    def _sample(self, turns: Sequence[_Turn], windows: Sequence[NDArray[np.int32]]) -> Tensor:
        codes_BF = torch.from_numpy(np.stack(windows).astype(np.int64)).to(self._device)
        starts = [self._mel.window_start(turn.progress.num_decoded) for turn in turns]
        noise = [
            self._noise(turn.state.seed, start, codes_BF.shape[1])
            for turn, start in zip(turns, starts, strict=True)
        ]
        noise_BMC = torch.from_numpy(np.stack(noise)).to(self._device, self._dtype)
        return self._mel.sample(codes_BF, noise_BMC, [turn.state.speaker for turn in turns])

    def _noise(self, seed: int, first_code: int, num_codes: int) -> NDArray[np.float32]:
        """Each block of mel frames of a request has noise of its own, whichever window it is in."""
        block = self._mel.block_codes
        repeats, first = self._mel.repeats, first_code // block
        shape = (block * repeats, self._mel_dim)
        blocks = [
            np.random.default_rng([seed, first + i]).standard_normal(shape, dtype=np.float32)
            for i in range(-(-num_codes // block))
        ]
        return np.concatenate(blocks)[: num_codes * repeats]

    def _with_mel(
        self, progress: Progress, chunk: Chunk, window: NDArray[np.int32], before: int, mel: Tensor
    ) -> Progress:
        repeats = self._mel.repeats
        new = mel[before * repeats : (before + chunk.num_new) * repeats][None]
        joined = new if progress.mel is None else torch.cat([progress.mel, new], dim=1)
        decoded = window[: before + chunk.num_new]
        return replace(
            progress,
            num_decoded=progress.num_decoded + chunk.num_new,
            # A later window begins at most three blocks before its chunk.
            codes=decoded[-3 * self._mel.block_codes :],
            mel=joined,
            num_waiting=progress.num_waiting + new.shape[1],
        )

    def _speak(self, group: Sequence[tuple[_Turn, int, int]]) -> None:
        hop = self._wave.samples_per_mel
        mels = [cast(Tensor, turn.progress.mel) for turn, _, _ in group]
        waves: Samples = self._wave.decode(torch.cat(mels)).float().numpy()
        for (turn, first, last), wave, mel in zip(group, waves, mels, strict=True):
            turn.samples.append(wave[first * hop : last * hop])
            kept = mel[:, max(0, last - MEL_CONTEXT) :]
            # A copy: what is kept must not hold the memory of the whole.
            waiting = mel.shape[1] - last
            turn.progress = replace(turn.progress, mel=kept.clone(), num_waiting=waiting)

    def _read_speakers(self, path: Path) -> dict[str, Speaker]:
        voices = load_voices(path)
        try:
            return {
                name: self._mel.speaker(
                    voice["cond"].to(self._device, self._dtype).reshape(1, -1),
                    voice["ref_mel"].to(self._device, self._dtype).reshape(1, -1, self._mel_dim),
                )
                for name, voice in voices.items()
            }
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            text = " ".join(str(error).split())[:300]
            raise ConfigError(f"{path} holds no voices of this model: {text}") from error


def _span(progress: Progress, is_last: bool) -> tuple[int, int] | None:
    """The mel frames, counted in what is kept, whose sound is due now."""
    mel = progress.mel
    assert mel is not None, "a chunk leaves mel frames"
    first = mel.shape[1] - progress.num_waiting
    last = mel.shape[1] - (0 if is_last else MEL_CONTEXT)
    return (first, last) if last > first else None


def _grouped(items: Sequence[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    groups: defaultdict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


def _num_steps(options: Mapping[str, object]) -> int:
    value = options.get("num_steps", 10)
    if not isinstance(value, int) or value < 2:
        raise ConfigError(f"num_steps must be at least 2, got {value!r}")
    return value
