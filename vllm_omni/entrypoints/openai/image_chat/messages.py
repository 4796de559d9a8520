"""The one message that a picture model reads: its words, and pictures to start from.

Works on the decoded JSON, so that no validator copies megabytes of base64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_omni.entrypoints.openai.media.image_loader import (
    ImageSource,
    InputImages,
    image_source_from_url,
)
from vllm_omni.errors import BadRequestError


def take_message(body: dict[str, Any]) -> tuple[str, InputImages]:
    """Prompt and pictures of `messages`, which leave the body.

    Raises:
        BadRequestError: not one message of a user, or a part that is neither text nor picture.
    """
    messages = body.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list with one message", field="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequestError("a message must be an object", field=f"messages[{i}]")
        if message.get("role") != "user" or len(messages) > 1:
            # What went before would be ignored in silence: the model has no memory.
            raise BadRequestError(
                "this model makes a picture of one message of the role user; "
                "send what it needs in that message",
                field=f"messages[{i}].role" if message.get("role") != "user" else "messages",
            )
    unknown = sorted(set(messages[0]) - {"role", "content", "name"})
    if unknown:
        raise BadRequestError("this field is not known", field=f"messages[0].{unknown[0]}")
    content = messages[0].get("content")
    if isinstance(content, str):
        return content, InputImages()
    if not isinstance(content, list):
        raise BadRequestError(
            "content must be a text or a list of parts", field="messages[0].content"
        )
    parts = list(_parts(content))
    words = [part for part in parts if isinstance(part, str)]
    images = tuple(part for part in parts if isinstance(part, ImageSource))
    return "\n".join(words), InputImages(images)


def _parts(content: list[Any]) -> Iterator[str | ImageSource]:
    for i, part in enumerate(content):
        path = f"messages[0].content[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield part["text"]
        elif kind == "image_url":
            yield _image(part.get("image_url"), f"{path}.image_url")
        else:
            raise BadRequestError(
                "a part is {'type': 'text', 'text': ...} or "
                "{'type': 'image_url', 'image_url': {'url': ...}}",
                field=path,
            )


def _image(value: object, path: str) -> ImageSource:
    if isinstance(value, dict):
        value, path = value.get("url"), f"{path}.url"
    if not isinstance(value, str):
        raise BadRequestError("the URL must be a text", field=path)
    return image_source_from_url(value, path)
