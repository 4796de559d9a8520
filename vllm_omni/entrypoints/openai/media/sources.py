"""Encoded media as a request carries them: base64, data URLs, bytes. Cheap checks only."""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass
from typing import Final

import pybase64

from vllm_omni.config.pipeline import Modality
from vllm_omni.errors import BadRequestError

_DATA_URL: Final = re.compile(
    r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE
)
_INLINE_CHARS: Final = 4096
_TYPES: Final = {
    Modality.AUDIO: ("audio", "video", "application"),
    Modality.IMAGE: ("image", "application"),
    Modality.VIDEO: ("video", "application"),
}
"""What a data URL may say that an item of this kind is. The bytes decide."""
_FILE_KINDS: Final = frozenset(kind.value for kind in _TYPES)


@dataclass(frozen=True, slots=True)
class EncodedMedia:
    """One media item, still encoded. `field` is its path in the request."""

    data: bytes
    field: str
    declared_format: str | None = None
    """What the client says it is; checked against what it is."""
    kind: Modality = Modality.AUDIO


def check_base64_size(
    text: str, max_bytes: int, field: str, kind: Modality = Modality.AUDIO
) -> None:
    """Refuse a base64 text that holds nothing or more than `max_bytes`, without decoding it."""
    if not text:
        raise BadRequestError(f"the {kind} is empty", field=field)
    if len(text) > (max_bytes + 2) // 3 * 4 + _INLINE_CHARS:
        raise too_large(max_bytes, field, kind)


def decode_base64(text: str, max_bytes: int, field: str, kind: Modality = Modality.AUDIO) -> bytes:
    """The bytes of a strict base64 text."""
    check_base64_size(text, max_bytes, field, kind)
    try:
        # The standard library's decoder would keep all other threads waiting 40 times as long.
        data = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        # binascii's own text quotes nothing of use; a URL-safe alphabet is the usual mistake.
        raise BadRequestError("not valid base64", field=field) from None
    if len(data) > max_bytes:
        raise too_large(max_bytes, field, kind)
    if not data:
        raise BadRequestError(f"the {kind} is empty", field=field)
    return data


def split_data_url(url: str, field: str, kind: Modality = Modality.AUDIO) -> str:
    """The base64 text of a `data:` URL."""
    match = _DATA_URL.match(url[:512])
    if match is None:
        raise BadRequestError("a data URL must be data:TYPE;base64,DATA", field=field)
    mime = (match["type"] or "").lower()
    if mime and mime.partition("/")[0] not in _TYPES[kind]:
        raise BadRequestError(f"{mime} is not {kind}", field=field)
    return url[match.end() :]


def kind_of_file(data_url: str, field: str) -> Modality:
    """What a file is, by the media type of its data URL."""
    match = _DATA_URL.match(data_url[:512])
    if match is None or match["type"] is None:
        raise BadRequestError(
            "a file must be a data URL with its media type, as in data:audio/wav;base64,DATA",
            field=field,
        )
    mime = match["type"].lower()
    main = mime.partition("/")[0]
    if main not in _FILE_KINDS:
        raise BadRequestError(f"a file must be audio, image or video, not {mime}", field=field)
    return Modality(main)


def too_large(max_bytes: int, field: str, kind: Modality = Modality.AUDIO) -> BadRequestError:
    """The error for an item over the operator's limit."""
    return BadRequestError(f"the {kind} is larger than {max_bytes} bytes", field=field)
