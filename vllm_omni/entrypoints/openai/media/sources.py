"""Encoded media as a request carries them: base64, data URLs, bytes. Cheap checks only."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Final

from vllm_omni.errors import BadRequestError

_DATA_URL: Final = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[^;,]*)*;base64,")
_INLINE_CHARS: Final = 4096
_TYPES: Final = {
    "audio": ("audio", "video", "application"),
    "image": ("image", "application"),
}
"""First halves of the media types that a data URL of each kind may name."""


@dataclass(frozen=True, slots=True)
class EncodedMedia:
    """One media item, still encoded. `field` is its path in the request."""

    data: bytes
    field: str
    declared_format: str | None = None
    """What the client says it is; checked against what it is."""


def check_base64_size(text: str, max_bytes: int, field: str, what: str = "audio") -> None:
    """Refuse a base64 text that holds nothing or more than `max_bytes`, without decoding it."""
    if not text:
        raise BadRequestError(f"the {what} is empty", field=field)
    if len(text) > (max_bytes + 2) // 3 * 4 + _INLINE_CHARS:
        raise too_large(max_bytes, field, what)


def decode_base64(text: str, max_bytes: int, field: str, what: str = "audio") -> bytes:
    """The bytes of a strict base64 text."""
    check_base64_size(text, max_bytes, field, what)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        # binascii's own text quotes nothing of use; a URL-safe alphabet is the usual mistake.
        raise BadRequestError("not valid base64", field=field) from None
    if len(data) > max_bytes:
        raise too_large(max_bytes, field, what)
    if not data:
        raise BadRequestError(f"the {what} is empty", field=field)
    return data


def split_data_url(url: str, field: str, what: str = "audio") -> str:
    """The base64 text of a `data:` URL."""
    match = _DATA_URL.match(url[:512])
    if match is None:
        raise BadRequestError("a data URL must be data:TYPE;base64,DATA", field=field)
    kind = match["type"]
    if kind and kind.partition("/")[0] not in _TYPES[what]:
        raise BadRequestError(f"{kind} is not {what}", field=field)
    return url[match.end() :]


def too_large(max_bytes: int, field: str, what: str = "audio") -> BadRequestError:
    """The error for an item over the operator's limit."""
    return BadRequestError(f"the {what} is larger than {max_bytes} bytes", field=field)
