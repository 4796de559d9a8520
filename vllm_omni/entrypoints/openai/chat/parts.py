"""Media parts of chat messages, before anything validates or renders them.

Works on the decoded JSON: a media part becomes the pipeline's placeholder or a short handle, its
encoded data stay beside it, and no validator ever copies them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from vllm_omni.config.pipeline import Modality
from vllm_omni.entrypoints.openai.media.decode import INPUT_FORMATS
from vllm_omni.entrypoints.openai.media.loader import MediaSource, source_from_url
from vllm_omni.entrypoints.openai.media.sources import kind_of_file
from vllm_omni.errors import BadRequestError, UnsupportedModalityError

_URL_KINDS: Final = {
    "audio_url": Modality.AUDIO,
    "image_url": Modality.IMAGE,
    "input_image": Modality.IMAGE,
    "video_url": Modality.VIDEO,
}
"""Parts whose media stand in a URL."""
_REFUSED_KINDS: Final = {
    "image_pil": Modality.IMAGE,
    "image_embeds": Modality.IMAGE,
    "audio_embeds": Modality.AUDIO,
    "video_embeds": Modality.VIDEO,
}
"""vLLM's further parts, which hold something that was decoded or embedded elsewhere."""
_MEDIA_KINDS: Final = {"input_audio": Modality.AUDIO} | _URL_KINDS | _REFUSED_KINDS
_FILE: Final = "file"
"""A part whose own data say what kind of media it is."""
_TEXT_KINDS: Final = ("text", "input_text", "output_text", None)
MAX_MESSAGES: Final = 4096
"""Messages and parts of one request together: each costs time to validate, even an empty one."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One media part of a message, with the list it stands in."""

    source: MediaSource
    parts: list[object]
    index: int

    def replace(self, part: dict[str, object]) -> None:
        """Put something else in its place."""
        self.parts[self.index] = part

    def replace_by_url(self, url: str) -> None:
        """Leave a part of the same kind that names `url`."""
        kind = f"{self.source.kind}_url"
        self.replace({"type": kind, kind: {"url": url}})


def find_media(messages: object, readable: frozenset[Modality]) -> list[MediaPart]:
    """Every media part in order; refuses malformed messages and media the pipeline cannot read."""
    if not isinstance(messages, list):
        raise BadRequestError("messages must be a list", field="messages")
    if not messages:
        raise BadRequestError("messages must not be empty", field="messages")
    _check_count(messages)
    found: list[MediaPart] = []
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
                source = _media_source(part, f"{path}.content[{j}]", readable)
                if source is not None:
                    found.append(MediaPart(source, content, j))
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


def _media_source(part: object, path: str, readable: frozenset[Modality]) -> MediaSource | None:
    """The media item that a part holds; None for a part of text."""
    if isinstance(part, str):
        return None
    if not isinstance(part, dict):
        raise BadRequestError("a content part must be an object", field=path)
    if part.get("uuid") is not None:
        # vLLM would take whatever it keeps under that name, another client's media included.
        raise BadRequestError("media are not known by uuid here", field=f"{path}.uuid")
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in (*_MEDIA_KINDS, _FILE) if name in part), None)
    if kind is not None and not isinstance(kind, str):
        raise BadRequestError("type must be a text", field=f"{path}.type")
    if kind == _FILE:
        return _file(part.get(_FILE), f"{path}.{_FILE}", readable)
    modality = _MEDIA_KINDS.get(kind or "")
    if kind is None or modality is None:
        _check_text(part, kind, path)
        return None
    if modality not in readable or kind in _REFUSED_KINDS:
        raise UnsupportedModalityError(f"this model does not read {kind} parts", field=path)
    if kind == "input_audio":
        return _input_audio(part.get("input_audio"), f"{path}.input_audio")
    key = "image_url" if kind == "input_image" else kind
    return _by_url(part.get(key), f"{path}.{key}", modality)


def _check_text(part: dict[str, object], kind: str | None, path: str) -> None:
    """Kinds beside text are vLLM's to know or refuse."""
    if kind in _TEXT_KINDS and not isinstance(part.get("text"), str):
        raise BadRequestError("text must be a text", field=f"{path}.text")


def _input_audio(value: object, path: str) -> MediaSource:
    if not isinstance(value, dict):
        raise BadRequestError("input_audio must be {'data': ..., 'format': ...}", field=path)
    data, form = value.get("data"), value.get("format")
    if not isinstance(data, str):
        raise BadRequestError("data must be a base64 text", field=f"{path}.data")
    if not isinstance(form, str) or form not in INPUT_FORMATS:
        raise BadRequestError(
            f"format must be one of {', '.join(INPUT_FORMATS)}", field=f"{path}.format"
        )
    return MediaSource(f"{path}.data", base64=data, declared_format=form)


def _file(value: object, path: str, readable: frozenset[Modality]) -> MediaSource:
    if not isinstance(value, dict):
        raise BadRequestError("file must be {'file_data': ...}", field=path)
    if value.get("file_id") is not None:
        raise BadRequestError("no files are kept here; send file_data", field=f"{path}.file_id")
    data, path = value.get("file_data"), f"{path}.file_data"
    if not isinstance(data, str):
        raise BadRequestError("file_data must be a data URL", field=path)
    kind = kind_of_file(data, path)
    if kind not in readable:
        raise UnsupportedModalityError(f"this model does not read {kind} files", field=path)
    return source_from_url(data, path, kind)


def _by_url(value: object, path: str, kind: Modality) -> MediaSource:
    if isinstance(value, dict):
        value, path = value.get("url"), f"{path}.url"
    if not isinstance(value, str):
        raise BadRequestError("the URL must be a text", field=path)
    return source_from_url(value, path, kind)


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
