"""From a piece of written text to what is to be said of it: no markup, no emoji, no markers.

Words and numbers stay as they are; pronouncing them is the phonemizer's business.
"""

from __future__ import annotations

import html
import re
from typing import Final

_RULES: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"<\|[^|<>\n]*\|>", " "),  # a special token's text
        (r"[\x00-\x08\x0e-\x1f\x7f]+", " "),  # control characters; C ends a text at the first
        (r"(?m)^[ \t]*(?:```|~~~).*$", " "),  # code fences
        (r"(?m)^[ \t]*\|?[ \t]*:?-{2,}[-:| \t]*$", " "),  # rules and the line below a table's head
        (r"!?\[([^\[\]\n]*)\]\([^()\s]*(?:[ \t]+\"[^\"\n]*\")?\)", r"\1"),  # links and pictures
        (r"\]\([^()\s]*\)", " "),  # a link whose beginning was in the piece before
        (r"https?://", ""),
        (r"</?[A-Za-z][^<>\n]*>", " "),  # HTML tags
        (r"(?m)^[ \t]*#{1,6}[ \t]+", ""),
        (r"(?m)^[ \t]*>[ \t]?", ""),
        (r"(?m)^[ \t]*[-*+\u2022][ \t]+", ""),
        (r"(?<=\d)[ \t]*[*\u00d7][ \t]*(?=\d)", " times "),
        (r"(?m)[ \t]*\|[ \t]*$", "\n"),
        (r"(?m)^[ \t]*\|", ""),
        (r"[ \t]*\|[ \t]*", ", "),
        (r"(?<=\w)_+(?=\w)", " "),
        (r"[*_`~\[\]{}\\^]+", ""),
        (
            "[\U0001f000-\U0001faff\u2600-\u27bf\u2b00-\u2bff\ufe00-\ufe0f\u200d\u20e3"
            "\U000e0020-\U000e007f\u200b\ufeff]+",
            " ",
        ),
        (r"[\u201c\u201d\u00ab\u00bb]", '"'),
        (r"[\u2018\u2019]", "'"),
        (r"\s+", " "),
        (r" +([,.;:!?])", r"\1"),
    )
)
_ENDS: Final = ".!?:;,-\u2026\u2014"


def speakable(piece: str) -> str:
    """What a voice is to say for a piece of text; empty when there is nothing to say."""
    text = html.unescape(piece)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = text.strip()
    if not any(char.isalnum() for char in text):
        return ""
    # The end of a line ends what is said, as a full stop would.
    if piece.rstrip(" \t").endswith("\n") and text.rstrip("\"')")[-1:] not in _ENDS:
        text += "."
    return text
