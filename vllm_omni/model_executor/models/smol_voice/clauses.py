"""Where running text may be cut so that a voice can start before the text is complete.

A cut depends on the text alone, never on the chunks it came in: whoever feeds the same text gets
the same pieces, and the pieces joined are the text. Runs in the voice's replica.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

_SENTENCE_ENDS: Final = ".!?\u2026"
_DASH: Final = "\u2014"
"""Stands between two words, often without spaces."""
_CLAUSE_ENDS: Final = ",;:\u2013" + _DASH
_CLOSERS: Final = "\"'\u201d\u2019)]}*_`~"
# fmt: off
_ABBREVIATIONS: Final = frozenset([
    "mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "gen", "col", "capt", "lt", "sgt", "rev",
    "hon", "vs", "etc", "fig", "approx", "dept", "est", "inc", "ltd", "co", "corp", "mt", "ave",
    "blvd", "cf", "al", "eds", "vol", "pp", "ca", "jan", "feb", "mar", "apr", "jun", "jul", "aug",
    "sep", "sept", "oct", "nov", "dec",
])
# fmt: on
_BEFORE_NUMBER: Final = frozenset(["no", "nos", "p", "eq", "sec", "ch", "art"])
"""Abbreviations only in front of a digit: "No. 5", but "No. Never."."""
_WORD_BEFORE: Final = re.compile(r"[^\s(\[\"'\u201c\u2018*_]+$")
_LIST_NUMBER: Final = re.compile(r"(?:^|\n)\s*\d{1,3}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRules:
    """Lengths in characters; `min_` counts letters and digits only."""

    first_min_clause: int = 10
    """The first piece may end at a comma when it says at least this much."""
    first_max: int = 90
    min_sentence: int = 12
    """Later sentences that are shorter go together with the next."""
    min_clause: int = 20
    max_piece: int = 220


class _Border(enum.Enum):
    NONE = enum.auto()
    CLAUSE = enum.auto()
    SENTENCE = enum.auto()
    LINE = enum.auto()
    UNDECIDED = enum.auto()
    """Depends on text that has not arrived."""


class ClauseCutter:
    """Takes text as it comes, gives pieces as soon as they are certain."""

    def __init__(self, rules: CutRules | None = None) -> None:
        self._rules = rules or CutRules()
        self._text = ""
        self._is_first = True
        self._marks_end = 0
        """End of the run of marks that was looked over last, and of the spaces behind it: each
        character is looked over once, however many marks stand in a row."""
        self._gap_end = 0
        self._restart()

    def _restart(self) -> None:
        self._scanned = 0
        self._num_spoken = 0
        self._clause_at = 0
        """End of the last clause in the text that is long enough to stand alone; 0: none."""
        self._space_at = 0

    def feed(self, text: str) -> list[str]:
        """Take more text; return the pieces that are complete."""
        self._text += text
        return self._take(final=False)

    def end(self) -> list[str]:
        """No more text: return the rest."""
        pieces = self._take(final=True)
        if self._text:
            pieces.append(self._text)
            self._text = ""
        return pieces

    def _take(self, *, final: bool) -> list[str]:
        pieces = []
        while cut := self._next_cut(final=final):
            pieces.append(self._text[:cut])
            self._text = self._text[cut:]
            self._marks_end = max(0, self._marks_end - cut)
            self._gap_end = max(0, self._gap_end - cut)
            self._is_first = False
            self._restart()
        return pieces

    def _next_cut(self, *, final: bool) -> int:
        """Length of the next piece; 0 when it is not certain yet."""
        rules = self._rules
        longest = rules.first_max if self._is_first else rules.max_piece
        while self._scanned < len(self._text):
            at = self._scanned
            border, end = self._border(at, final=final)
            if border is _Border.UNDECIDED:
                return 0
            self._scanned += 1
            self._num_spoken += self._text[at].isalnum()
            if self._ends_piece(border):
                return end
            if (
                border in (_Border.CLAUSE, _Border.SENTENCE)
                and self._num_spoken >= rules.min_clause
            ):
                self._clause_at = end
            if self._text[at].isspace() and self._num_spoken:
                self._space_at = at + 1
            if self._scanned >= longest:
                return self._clause_at or self._space_at or longest
        return 0

    def _ends_piece(self, border: _Border) -> bool:
        rules, spoken = self._rules, self._num_spoken
        match border:
            case _Border.LINE:
                return spoken > 0
            case _Border.SENTENCE:
                return spoken >= (1 if self._is_first else rules.min_sentence)
            case _Border.CLAUSE:
                return self._is_first and spoken >= rules.first_min_clause
        return False

    def _border(self, at: int, *, final: bool) -> tuple[_Border, int]:
        """What kind of border the character at `at` is, and where the piece before would end."""
        text = self._text
        char = text[at]
        if char == "\n":
            return _Border.LINE, at + 1
        if char not in _SENTENCE_ENDS and char not in _CLAUSE_ENDS:
            return _Border.NONE, 0
        after, following = self._look_over(at)
        if following == len(text):
            return (_Border.NONE, 0) if final else (_Border.UNDECIDED, 0)
        if text[following] == "\n":
            return _Border.NONE, 0  # the line's end is the border
        if following == after and char != _DASH:
            return _Border.NONE, 0
        if char in _CLAUSE_ENDS:
            return _Border.CLAUSE, following
        return _sentence_border(text, at, following), following

    def _look_over(self, at: int) -> tuple[int, int]:
        """Where the marks behind the one at `at` end, and the spaces behind those."""
        text = self._text
        after = max(self._marks_end, at + 1)
        while after < len(text) and (text[after] in _CLOSERS or text[after] in _SENTENCE_ENDS):
            after += 1
        following = max(self._gap_end, after)
        while following < len(text) and text[following].isspace() and text[following] != "\n":
            following += 1
        self._marks_end, self._gap_end = after, following
        return after, following


def _sentence_border(text: str, at: int, following: int) -> _Border:
    """Whether the mark at `at` ends a sentence, given the next word's first character."""
    next_char = text[following]
    if text[at] == "." and _is_abbreviation(text[:at], next_char):
        return _Border.NONE
    return _Border.CLAUSE if next_char.islower() else _Border.SENTENCE


def _is_abbreviation(before: str, next_char: str) -> bool:
    if _LIST_NUMBER.search(before):
        return True
    match = _WORD_BEFORE.search(before)
    if match is None:
        return False
    word = match[0].lower()
    # An initial, or the last letter of "e.g." and "U.S.".
    if word[-1].isalpha() and (len(word) == 1 or word[-2] == "."):
        return True
    return word in _ABBREVIATIONS or (word in _BEFORE_NUMBER and next_char.isdigit())
