"""Server-sent events that carry media.

A chunk of speech is tens of kilobytes of base64 many times a second. Base64 has nothing that JSON
would escape, so it is put into the event as it is, once, and never looked through. What the events
of a stream have in common is written once for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pybase64


class MediaEvents:
    """Events that differ in their data alone."""

    __slots__ = ("_after", "_before")

    def __init__(self, value: Mapping[str, object], field: str) -> None:
        """Events of `value` with the data as its one `field` that is an empty text."""
        # Quotes inside of texts are escaped: nothing else in the JSON reads like this.
        before, after = json.dumps(value).split(f'"{field}": ""')
        self._before = f'data: {before}"{field}": "'.encode()
        self._after = f'"{after}\n\n'.encode()

    def event(self, data: bytes) -> bytes:
        """The event with this data, in base64."""
        return b"".join((self._before, pybase64.b64encode(data), self._after))
