"""Media parts of chat messages, before anything validates or renders them.

Works on the decoded JSON: an audio part becomes the pipeline's placeholder, its encoded data stay
beside it, and no validator ever copies them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from vllm_omni.config.pipeline import Modality
from vllm_omni.entrypoints.openai.media.decode import INPUT_FORMATS
from vllm_omni.entrypoints.openai.media.loader import AudioSource, audio_source_from_url
from vllm_omni.errors import BadRequestError, UnsupportedModalityError

_OTHER_MEDIA: Final = {
    "image_url": Modality.IMAGE,
    "image_pil": Modality.IMAGE,
    "image_embeds": Modality.IMAGE,
    "input_image": Modality.IMAGE,
    "video_url": Modality.VIDEO,
    "audio_embeds": Modality.AUDIO,
}
_AUDIO_KINDS: Final = ("input_audio", "audio_url")
_TEXT_KINDS: Final = ("text", "input_text", "output_text", None)
MAX_MESSAGES: Final = 4096
"""Messages and parts of one request together: each costs time to validate, even an empty one."""


@dataclass(frozen=True, slots=True)
class AudioPart:
    """One audio part of a message, with the list it stands in."""

    source: AudioSource
    parts: list[object]
    index: int

    def replace(self, part: dict[str, object]) -> None:
        self.parts[self.index] = part


def find_audio(messages: object, readable: frozenset[Modality]) -> list[AudioPart]:
    """Every audio part in order; refuses malformed messages and media the pipeline cannot read."""
    if not isinstance(messages, list):
        raise BadRequestError("messages must be a list", field="messages")
    if not messages:
        raise BadRequestError("messages must not be empty", field="messages")
    _check_count(messages)
    found: list[AudioPart] = []
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        if not isinstance(message, dict):
            raise BadRequestError("a message must be an object", field=path)
        if not isinstance(message.get("role"), str):
            raise BadRequestError("a message needs a role", field=f"{path}.role")
        _check_content(message, path)
        content = message.get("content")
        if isinstance(content, list):
            for j, part in enumerate(content):
                source = _audio_source(part, f"{path}.content[{j}]", readable)
                if source is not None:
                    found.append(AudioPart(source, content, j))
    return found


def refuse_placeholder(body: dict[str, object], placeholder: str) -> None:
    """Refuse a placeholder in the client's own words: it would stand for media it never sent."""
    if not any(placeholder in text for text in _texts(body)):
        return
    for path, text in _named_texts(body):
        if placeholder in text:
            raise BadRequestError(
                f"{placeholder!r} is reserved in this model's prompts", field=path
            )


def _check_count(messages: list[object]) -> None:
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if len(messages) + num_parts > MAX_MESSAGES:
        raise BadRequestError(
            f"{len(messages)} messages with {num_parts} parts are more than the {MAX_MESSAGES} "
            "that one request may have together",
            field="messages",
        )


def _check_content(message: dict[str, object], path: str) -> None:
    content = message.get("content")
    if content is not None and not isinstance(content, str | list | dict):
        raise BadRequestError("content must be a text or a list of parts", field=f"{path}.content")
    said_before = message.get("audio")
    if said_before is None:
        return
    if not isinstance(said_before, dict) or not isinstance(said_before.get("id"), str):
        raise BadRequestError("audio must be {'id': ...}", field=f"{path}.audio")
    if not content:
        raise BadRequestError(
            "audio of earlier answers is not kept; send its transcript as content",
            field=f"{path}.audio.id",
        )


def _audio_source(part: object, path: str, readable: frozenset[Modality]) -> AudioSource | None:
    """The audio that a part holds; None for a part of text."""
    if isinstance(part, str):
        return None
    if not isinstance(part, dict):
        raise BadRequestError("a content part must be an object", field=path)
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in (*_AUDIO_KINDS, *_OTHER_MEDIA) if name in part), None)
    if kind is not None and not isinstance(kind, str):
        raise BadRequestError("type must be a text", field=f"{path}.type")
    modality = Modality.AUDIO if kind in _AUDIO_KINDS else _OTHER_MEDIA.get(kind or "")
    if modality is None:
        _check_text(part, kind, path)
        return None
    if modality not in readable or kind == "audio_embeds":
        raise UnsupportedModalityError(f"this model does not read {kind} parts", field=path)
    if kind == "input_audio":
        return _input_audio(part.get("input_audio"), f"{path}.input_audio")
    if kind == "audio_url":
        return _audio_url(part.get("audio_url"), f"{path}.audio_url")
    if kind in ("image_url", "video_url"):
        _check_inline(part.get(kind), f"{path}.{kind}")
    return None


def _check_text(part: dict[str, object], kind: str | None, path: str) -> None:
    """Kinds beside text are vLLM's to know or refuse."""
    if kind in _TEXT_KINDS and not isinstance(part.get("text"), str):
        raise BadRequestError("text must be a text", field=f"{path}.text")


def _check_inline(value: object, path: str) -> None:
    """Images and videos are vLLM's to decode, and its fetcher would connect anywhere."""
    url, path = (value.get("url"), f"{path}.url") if isinstance(value, dict) else (value, path)
    if not isinstance(url, str) or not url[:5].lower() == "data:":
        raise BadRequestError("send a data URL", field=path)


def _input_audio(value: object, path: str) -> AudioSource:
    if not isinstance(value, dict):
        raise BadRequestError("input_audio must be {'data': ..., 'format': ...}", field=path)
    data, form = value.get("data"), value.get("format")
    if not isinstance(data, str):
        raise BadRequestError("data must be a base64 text", field=f"{path}.data")
    if not isinstance(form, str) or form not in INPUT_FORMATS:
        raise BadRequestError(
            f"format must be one of {', '.join(INPUT_FORMATS)}", field=f"{path}.format"
        )
    return AudioSource(f"{path}.data", base64=data, declared_format=form)


def _audio_url(value: object, path: str) -> AudioSource:
    if isinstance(value, dict):
        value, path = value.get("url"), f"{path}.url"
    if not isinstance(value, str):
        raise BadRequestError("the URL must be a text", field=path)
    return audio_source_from_url(value, path)


def _texts(body: dict[str, object]) -> Iterator[str]:
    """Every text in a JSON value. With a stack: nesting is the client's choice."""
    stack: list[object] = [body]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(item for item in value if isinstance(item, str | dict | list))


def _named_texts(body: dict[str, object]) -> Iterator[tuple[str, str]]:
    """The same, each with its path: many times slower, for a body known to be refused."""
    stack: list[tuple[str, object]] = list(body.items())
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, dict):
            stack += [(f"{path}.{name}", item) for name, item in value.items()]
        elif isinstance(value, list):
            stack += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
