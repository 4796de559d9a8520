"""Audio prompts for a speech model of vLLM: resampled, split, with the model's own decoder prompt.

Runs in a worker thread of the API process. Nothing here knows a model: rate, clip length and
prompt come from the model class's speech-to-text interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from vllm.config import ModelConfig
from vllm.config.speech_to_text import SpeechToTextParams
from vllm.model_executor.model_loader import get_model_cls
from vllm.model_executor.models.interfaces import supports_transcription
from vllm.multimodal.audio import resample_audio_soxr, split_audio

from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import AudioInput

SETTINGS_KEY: Final = "speech_to_text"
"""Key of `SamplingParams.extra_args` (a stage's defaults) and of `OmniPrompt.extra` (a request's
own) for the settings below."""

_SETTINGS: Final = ("language", "task_type", "request_prompt", "hotwords", "to_language")
DECODER_PROMPT: Final = "decoder_prompt"
"""Setting that replaces the decoder prompt of the model class (a checkpoint that was trained
without language and task tokens)."""

MIN_AUDIO_S: Final = 0.01
MIN_RATE_HZ, MAX_RATE_HZ = 1_000, 384_000


@dataclass(frozen=True, slots=True)
class SpeechPrompts:
    """Prompts of one audio item."""

    prompts: list[Any]
    """vLLM prompts, one for each clip, in order."""
    separator: str
    """Stands between the texts of two clips."""


class SpeechPrompter:
    """Makes the prompts of one stage's speech model."""

    def __init__(self, model_config: ModelConfig) -> None:
        self._model_config = model_config
        self._model_class = get_model_cls(model_config)
        self._config = self._model_class.get_speech_to_text_config(model_config, "transcribe")

    @classmethod
    def of(cls, model_config: ModelConfig) -> SpeechPrompter | None:
        """None for a model that takes prompts of its own, with or without audio in them."""
        model_class = get_model_cls(model_config)
        if supports_transcription(model_class) and model_class.supports_transcription_only:
            return cls(model_config)
        return None

    def prompts(self, audio: AudioInput, settings: Mapping[str, object]) -> SpeechPrompts:
        """The prompts of one audio item; one unless it is longer than the model hears at once.

        Raises:
            BadRequestError: audio or settings that the model cannot take.
        """
        unknown = sorted(set(settings) - {*_SETTINGS, DECODER_PROMPT})
        if unknown:
            raise BadRequestError(
                f"unknown setting {unknown[0]!r} for audio; known: "
                f"{', '.join((*_SETTINGS, DECODER_PROMPT))}",
                field=unknown[0],
            )
        values = {name: settings[name] for name in _SETTINGS if settings.get(name) is not None}
        values["language"] = language = self._language(values.get("language"))
        spaceless = language in self._model_class.no_space_languages
        decoder_prompt = settings.get(DECODER_PROMPT)
        prompts = []
        for clip in self._clips(audio):
            params = SpeechToTextParams(
                audio=clip, stt_config=self._config, model_config=self._model_config, **values
            )
            prompt = self._model_class.get_generation_prompt(params)
            if decoder_prompt is not None:
                prompt = with_decoder_prompt(prompt, str(decoder_prompt))
            prompts.append(prompt)
        return SpeechPrompts(prompts, "" if spaceless else " ")

    def _language(self, language: object) -> str | None:
        if language is None:
            # No detection: that would be a request of its own before this one.
            return "en" if "en" in self._model_class.supported_languages else None
        try:
            valid = self._model_class.validate_language(str(language))
        except ValueError as error:
            raise BadRequestError(str(error), field="language") from error
        return str(valid) if valid is not None else None

    def _clips(self, audio: AudioInput) -> Sequence[NDArray[np.float32]]:
        config = self._config
        samples = resample(audio, round(config.sample_rate))
        limit_s = config.max_audio_clip_s
        if limit_s is None or len(samples) <= limit_s * config.sample_rate:
            return [samples]
        if not config.allow_audio_chunking:
            raise BadRequestError(f"audio is longer than {limit_s} s", field="audio")
        return split_audio(
            audio_data=samples,
            sample_rate=round(config.sample_rate),
            max_clip_duration_s=limit_s,
            overlap_duration_s=config.overlap_chunk_second,
            min_energy_window_size=config.min_energy_split_window_size,
        )


def with_decoder_prompt(prompt: Mapping[str, Any], own: str) -> dict[str, Any]:
    """A speech prompt with the checkpoint's own decoder prompt in place of the model class's.

    What a user wrote stands before the first token of both, and stays.
    """
    decoder = prompt["decoder_prompt"]
    text = str(decoder["prompt"] if isinstance(decoder, Mapping) else decoder)
    opening, mark, _ = own.partition("|>")
    before, found, _ = text.partition(opening + mark)
    if not (mark and found):
        before = ""
    return {**prompt, "decoder_prompt": {"prompt": before + own}}


def resample(audio: AudioInput, rate_hz: int) -> NDArray[np.float32]:
    """The samples at another rate, checked first.

    Raises:
        BadRequestError: samples that are not one channel of finite numbers.
    """
    samples = check_audio(audio)
    if audio.sample_rate_hz == rate_hz:
        return samples
    resampled: NDArray[np.float32] = resample_audio_soxr(
        samples, orig_sr=audio.sample_rate_hz, target_sr=rate_hz
    )
    return resampled.astype(np.float32, copy=False)


def check_audio(audio: AudioInput) -> NDArray[np.float32]:
    """The samples, when a model can take them.

    Raises:
        BadRequestError: empty, not mono, not finite, or at a rate no recorder has.
    """
    samples = np.asarray(audio.samples)
    if samples.ndim != 1:
        raise BadRequestError(f"audio must be mono, got shape {samples.shape}", field="audio")
    if not MIN_RATE_HZ <= audio.sample_rate_hz <= MAX_RATE_HZ:
        raise BadRequestError(
            f"audio has a sample rate of {audio.sample_rate_hz} Hz, not {MIN_RATE_HZ} to "
            f"{MAX_RATE_HZ}",
            field="audio",
        )
    if len(samples) < MIN_AUDIO_S * audio.sample_rate_hz:
        raise BadRequestError(f"audio is shorter than {MIN_AUDIO_S} s", field="audio")
    samples = samples.astype(np.float32, copy=False)
    if not np.isfinite(samples).all():
        raise BadRequestError("audio has samples that are not finite numbers", field="audio")
    return samples
