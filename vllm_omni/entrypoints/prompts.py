"""Prompts in all the forms that users give them, to the one form the engine takes."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vllm_omni.config.deploy import ServerLimits
from vllm_omni.config.pipeline import Modality, PipelineConfig, StageConfig
from vllm_omni.engine.stage_client import TextPreparer
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import AudioInput, ImageInput, OmniPrompt

_ENGINE_INPUT_TYPES: Final = frozenset({"token", "embeds", "multimodal", "enc_dec"})
"""Tags of prompts that vLLM's renderer made."""
_MESSAGES_KEYS: Final = frozenset({"messages", "chat_template_kwargs", "mm_processor_kwargs"})
_AUDIO_PARTS: Final = frozenset({"audio", "input_audio", "audio_url"})


@dataclasses.dataclass(frozen=True, slots=True)
class DeferredPrompt:
    """A prompt whose media are still encoded: decoded only once the request was admitted."""

    load: Callable[[], Awaitable[OmniPrompt]]


def parse_prompt(prompt: object) -> OmniPrompt:
    """A prompt without messages as an `OmniPrompt`.

    Takes text, vLLM's prompt dictionaries, prompts its renderer made, and `OmniPrompt`.

    Raises:
        BadRequestError: none of these, or a value of the wrong type.
    """
    if isinstance(prompt, OmniPrompt):
        return prompt
    if isinstance(prompt, str):
        return OmniPrompt(text=prompt)
    if not isinstance(prompt, Mapping):
        raise BadRequestError(
            f"a prompt is a string, a dictionary or an OmniPrompt, not {type(prompt).__name__}",
            field="prompt",
        )
    if prompt.get("type") in _ENGINE_INPUT_TYPES:
        text = prompt.get("prompt")
        return OmniPrompt(engine_input=prompt, text=text if isinstance(text, str) else None)
    return _parse_dictionary(prompt)


def _parse_dictionary(prompt: Mapping[str, Any]) -> OmniPrompt:
    media = dict(prompt.get("multi_modal_data") or {})
    audio = parse_audio(media.pop("audio", None))
    extra = {
        key: value
        for key, value in prompt.items()
        if key not in ("prompt", "prompt_token_ids", "multi_modal_data")
    }
    if media:
        extra["multi_modal_data"] = media
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise BadRequestError("prompt must be a string", field="prompt")
    if text is None and token_ids is None and not audio:
        raise BadRequestError(
            "a prompt needs 'prompt', 'prompt_token_ids' or 'multi_modal_data'", field="prompt"
        )
    # The text of a prompt that has tokens too is only its source.
    return OmniPrompt(
        text=None if token_ids is not None else text,
        token_ids=token_ids,
        audio=audio,
        extra=extra,
    )


def parse_audio(value: object) -> tuple[AudioInput, ...]:
    """Audio as vLLM takes it: `(samples, rate)` or a list of them.

    Raises:
        BadRequestError: not that.
    """
    if value is None:
        return ()
    items = value if isinstance(value, list) else [value]
    return tuple(_parse_audio_item(item) for item in items)


def _parse_audio_item(item: object) -> AudioInput:
    if isinstance(item, AudioInput):
        return item
    if not isinstance(item, tuple) or len(item) != 2:
        raise BadRequestError("audio is a pair of samples and sample rate", field="audio")
    samples, rate_hz = item
    if isinstance(rate_hz, bool) or not isinstance(rate_hz, int | float | np.integer):
        raise BadRequestError("the sample rate of audio is a number", field="audio")
    try:
        array = np.asarray(samples)
    except (TypeError, ValueError) as error:
        raise BadRequestError(f"audio samples are not an array: {error}", field="audio") from None
    return AudioInput(_mono_float(array), int(rate_hz))


def _mono_float(samples: NDArray[Any]) -> NDArray[np.float32]:
    if samples.dtype.kind == "i":
        samples = samples.astype(np.float32) / float(np.iinfo(samples.dtype).max + 1)
    elif samples.dtype.kind != "f":
        raise BadRequestError("audio samples are float or integer numbers", field="audio")
    if samples.ndim == 2:
        samples = samples.mean(axis=int(samples.shape[1] <= samples.shape[0]))
    if samples.ndim != 1:
        raise BadRequestError("audio samples are one channel or two", field="audio")
    return samples.astype(np.float32, copy=False)


def take_images(prompt: OmniPrompt) -> OmniPrompt:
    """A prompt for a diffusion stage: pictures under `multi_modal_data` become its own.

    Takes PIL images and 8 bit arrays, one or a list of them, as `image` and `mask_image`.

    Raises:
        BadRequestError: not pictures, or other media.
    """
    media = prompt.extra.get("multi_modal_data")
    if media is None:
        return prompt
    if not isinstance(media, Mapping):
        raise BadRequestError("multi_modal_data is a dictionary", field="multi_modal_data")
    left = dict(media)
    given, mask = left.pop("image", None), left.pop("mask_image", None)
    if left:
        name = min(left)
        raise BadRequestError(f"this model does not read {name!r}", field="multi_modal_data")
    items = given if isinstance(given, list | tuple) else [] if given is None else [given]
    return dataclasses.replace(
        prompt,
        images=tuple(_parse_image(item) for item in items),
        mask=_parse_mask(mask) if mask is not None else None,
        extra={key: value for key, value in prompt.extra.items() if key != "multi_modal_data"},
    )


def _parse_image(item: object) -> ImageInput:
    if isinstance(item, ImageInput):
        return item
    if isinstance(item, Image.Image):
        return ImageInput(np.asarray(item.convert("RGB")))
    array = np.asarray(item)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise BadRequestError(
            "a picture is a PIL image or 8 bit numbers [height, width, 3]", field="image"
        )
    return ImageInput(array)


def _parse_mask(item: object) -> ImageInput:
    if isinstance(item, ImageInput):
        return item
    array = np.asarray(item.convert("L") if isinstance(item, Image.Image) else item)
    if array.dtype != np.uint8 or array.ndim != 2 or not array.size:
        raise BadRequestError(
            "a mask is a PIL image or 8 bit numbers [height, width]", field="mask"
        )
    return ImageInput(array)


def check_audio(audio: Sequence[AudioInput], limits: ServerLimits) -> None:
    """Refuse audio that no stage should see.

    Raises:
        BadRequestError: too many, too long, empty, or samples that are no numbers.
    """
    if len(audio) > limits.max_media_items:
        raise BadRequestError(
            f"{len(audio)} audio items; the limit is {limits.max_media_items}", field="audio"
        )
    for item in audio:
        if not item.sample_rate_hz > 0:
            raise BadRequestError("the sample rate of audio must be positive", field="audio")
        if not item.samples.size:
            raise BadRequestError("audio has no samples", field="audio")
        duration_s = item.samples.size / item.sample_rate_hz
        if duration_s > limits.max_audio_s:
            raise BadRequestError(
                f"audio of {duration_s:.1f} s; the limit is {limits.max_audio_s:g} s", field="audio"
            )
        if not np.isfinite(item.samples).all():
            raise BadRequestError("audio has samples that are not finite numbers", field="audio")


def check_placeholders(prompt: OmniPrompt, pipeline: PipelineConfig, main: StageConfig) -> None:
    """Media that an upstream stage turns into text stand in the prompt, once for each item.

    Raises:
        BadRequestError: there are more or fewer.
    """
    placeholder = pipeline.placeholders.get(Modality.AUDIO)
    if placeholder is None or Modality.AUDIO in main.accepts:
        return
    found = prompt.text.count(placeholder) if prompt.text is not None else 0
    if found != len(prompt.audio):
        raise BadRequestError(
            f"the prompt has {found} of the placeholder {placeholder!r} for "
            f"{len(prompt.audio)} audio items",
            field="prompt",
        )


async def render_messages(
    prompt: Mapping[str, Any], pipeline: PipelineConfig, preparer: TextPreparer
) -> OmniPrompt:
    """A conversation through the chat template of the stage that reads it.

    Audio parts `{"type": "audio", "audio": (samples, rate)}` become placeholders where an
    upstream stage turns audio into text. A stage that reads media itself takes vLLM's parts too:
    `image_url`, `audio_url`, `video_url`, `image_pil`.

    Raises:
        BadRequestError: not a conversation, or it writes a placeholder itself.
    """
    unknown = set(prompt) - _MESSAGES_KEYS
    if unknown:
        raise BadRequestError(f"unknown key {min(unknown)!r} beside 'messages'", field="prompt")
    placeholder = pipeline.placeholders.get(Modality.AUDIO)
    audio: list[AudioInput] = []
    messages = prompt["messages"]
    if isinstance(messages, list):
        if placeholder is not None:
            messages = [_with_placeholders(message, placeholder, audio) for message in messages]
        else:
            messages = [_with_recordings(message) for message in messages]
    rendered = await preparer.render_messages(
        messages, prompt.get("chat_template_kwargs"), prompt.get("mm_processor_kwargs")
    )
    return dataclasses.replace(rendered, audio=tuple(audio))


def _with_placeholders(message: object, placeholder: str, audio: list[AudioInput]) -> object:
    if not isinstance(message, Mapping):
        return message
    content = message.get("content")
    if isinstance(content, str):
        _refuse_placeholder(content, placeholder)
        return message
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in _AUDIO_PARTS:
            audio.append(_parse_audio_item(part.get("audio")))
            parts.append({"type": "text", "text": placeholder})
            continue
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            _refuse_placeholder(part["text"], placeholder)
        parts.append(part)
    return {**message, "content": parts}


def _with_recordings(message: object) -> object:
    """Samples in the form that vLLM's renderer reads."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    parts = [
        _recording(part) if isinstance(part, Mapping) and part.get("type") == "audio" else part
        for part in content
    ]
    return {**cast(Mapping[str, object], message), "content": parts}


def _recording(part: Mapping[str, object]) -> dict[str, object]:
    import soundfile

    audio = _parse_audio_item(part.get("audio"))
    buffer = io.BytesIO()
    soundfile.write(buffer, audio.samples, audio.sample_rate_hz, format="WAV", subtype="FLOAT")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}}


def _refuse_placeholder(text: str, placeholder: str) -> None:
    if placeholder in text:
        raise BadRequestError(
            f"the text may not contain {placeholder!r}: it stands for audio", field="messages"
        )
