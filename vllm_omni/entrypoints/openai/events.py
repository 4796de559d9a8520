"""Server-sent events that carry media.

A chunk of speech is tens of kilobytes of base64 many times a second. Base64 has nothing that JSON
would escape, so it is put into the event as it is, once, and never looked through.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pybase64


def media_event(value: Mapping[str, object], field: str, data: bytes) -> bytes:
    """The event of `value` with `data` in base64 as its one `field` that is an empty text."""
    # Quotes inside of texts are escaped: nothing else in the JSON reads like this.
    before, after = json.dumps(value).split(f'"{field}": ""')
    parts = [b"data: ", before.encode(), f'"{field}": "'.encode()]
    return b"".join([*parts, pybase64.b64encode(data), b'"', after.encode(), b"\n\n"])
