"""Runs of what a grammar may leave out: what compiling one mostly costs, read off its text.

`a?b?c?` is a run of three: a state before it leads to all of them, and the compiler makes a state
for every pair. One thing that must be there ends a run. This is a look at the text, not a parser:
what is malformed gets some figure, and the compiler says what is wrong with it.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

_REGEX: Final = re.compile(
    r"""
      (?P<open> \( (?: \?(?: P?<[^>=!]{0,64}> | <?[=!] | [a-zA-Z-]*:? ) )? )
    | (?P<close> \) )
    | (?P<alt> \| )
    | (?P<count> [*+?]\?? | \{\d*(?:,\d*)?\}\?? )
    | (?P<nothing> [\^$] )
    | (?P<atom> \\. | \[\^?\]?(?:\\.|[^\]\\])*+\]? | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_RULES: Final = re.compile(
    r"""
      (?P<nothing> \s++ | \#[^\n]*+ | //[^\n]*+ | ->\s*+\w++ )
    | (?P<rule> [?!]?[\w.-]++ \s*+ (?: ::= | : ) )
    | (?P<text> "(?:\\.|[^"\\])*+"?i? | '(?:\\.|[^'\\])*+'? )
    | (?P<pattern> /(?:\\.|[^/\\\n])++/?[a-z]*+ )
    | (?P<name> [\w.-]++ )
    | (?P<open> \((?:=)? )
    | (?P<close> \) )
    | (?P<alt> \| )
    | (?P<count> [*+?] | ~\s*+\d++(?:\.\.\d++)? | \{\s*+\d*+\s*+(?:,\s*+\d*+\s*+)?\} )
    | (?P<bracket> \[\^?\]?(?:\\.|[^\]\\])*+\]? )
    | (?P<atom> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_MAX_PASSES: Final = 16
"""Over the rules, last to first, to learn which may be nothing; beyond them all may."""


class Kind(enum.Enum):
    """What a piece of a grammar's text is."""

    OPEN = enum.auto()
    CLOSE = enum.auto()
    ALT = enum.auto()
    ATOM = enum.auto()
    NAME = enum.auto()
    COUNT = enum.auto()


Token = tuple[Kind, str]


@dataclass(frozen=True, slots=True)
class _Item:
    """One thing of a sequence: a character, a rule, or a whole group."""

    may_be_empty: bool
    num_optional: int = 0
    """Things inside that may be left out."""
    starts_with: int = 0
    ends_with: int = 0
    """Longest runs at the ends of its alternatives."""


@dataclass(slots=True)
class _Group:
    """What is known of a group while it is read."""

    may_be_empty: bool = False
    """One of its alternatives so far may be nothing."""
    num_optional: int = 0
    starts_with: int = 0
    ends_with: int = 0
    run: int = 0
    """Of the alternative that is being read."""
    is_empty_so_far: bool = True
    """Nothing of this alternative must be there."""

    def item(self) -> _Item:
        return _Item(self.may_be_empty, self.num_optional, self.starts_with, self.ends_with)


class Runs:
    """Reads a grammar's tokens; `cost` is the sum of the squares of the runs."""

    def __init__(self, empty_rules: Container[str] = frozenset()) -> None:
        self._empty_rules = empty_rules
        self.cost = 0
        self.may_be_empty = False
        """Whether all that was read last may be nothing."""

    def read(self, tokens: Iterable[Token]) -> None:
        stack = [_Group()]
        last: _Item | None = None
        for kind, text in tokens:
            if kind is Kind.COUNT:
                if last is not None and _is_from_zero(text):
                    last = dataclasses.replace(last, may_be_empty=True)
                continue
            self._take(stack[-1], last)
            last = None
            if kind is Kind.OPEN:
                stack.append(_Group())
            elif kind is Kind.ALT:
                self._end_alternative(stack[-1])
            elif kind is Kind.NAME:
                last = _Item(text in self._empty_rules)
            elif kind is Kind.ATOM:
                last = _Item(not text)
            elif len(stack) > 1:
                group = stack.pop()
                self._end_alternative(group)
                last = group.item()
        while stack:
            group = stack.pop()
            self._take(group, last)
            self._end_alternative(group)
            last = group.item()
        self.may_be_empty = last is not None and last.may_be_empty

    def _take(self, group: _Group, item: _Item | None) -> None:
        """Put an item at the end of a group's alternative."""
        if item is None:
            return
        group.num_optional += item.num_optional + item.may_be_empty
        if item.may_be_empty:
            group.run += 1 + item.num_optional
            return
        run = group.run + item.starts_with
        self.cost += run**2
        if group.is_empty_so_far:
            group.starts_with = max(group.starts_with, run)
        group.run, group.is_empty_so_far = item.ends_with, False

    def _end_alternative(self, group: _Group) -> None:
        self.cost += group.run**2
        group.ends_with = max(group.ends_with, group.run)
        group.may_be_empty |= group.is_empty_so_far
        group.run, group.is_empty_so_far = 0, True


def regex_cost(pattern: str) -> int:
    """What the runs of a regular expression cost."""
    runs = Runs()
    runs.read(_regex_tokens(pattern))
    return runs.cost


def rules_cost(grammar: str) -> int:
    """What the runs of all rules of a grammar cost, EBNF or Lark."""
    rules = _rules(grammar)
    empty = _empty_rules(rules)
    runs = Runs(empty)
    for tokens in rules.values():
        runs.read(tokens)
    return runs.cost


def _empty_rules(rules: Mapping[str, list[Token]]) -> Container[str]:
    """Names of the rules that may be nothing."""
    empty: set[str] = set()
    backwards = [*rules.items()][::-1]
    for _ in range(_MAX_PASSES):
        before = len(empty)
        for name, tokens in backwards:
            if name not in empty:
                runs = Runs(empty)
                runs.read(tokens)
                if runs.may_be_empty:
                    empty.add(name)
        if len(empty) == before:
            return empty
    return rules.keys()


def _rules(grammar: str) -> dict[str, list[Token]]:
    rules: dict[str, list[Token]] = {}
    is_lark = "::=" not in grammar
    tokens: list[Token] = []
    for found in _RULES.finditer(grammar):
        kind, text = found.lastgroup, found.group()
        if kind == "rule":
            name = text.rstrip(":=").strip().lstrip("?!")
            tokens = rules.setdefault(name, [])
            if tokens:  # defined twice: both are taken
                tokens.append((Kind.ALT, "|"))
        else:
            tokens += _rule_token(kind, text)
            if is_lark and kind == "bracket":  # what stands in it may be left out
                tokens.append((Kind.COUNT, "?"))
    return rules


def _rule_token(kind: str | None, text: str) -> Iterator[Token]:
    match kind:
        case "text":
            yield Kind.ATOM, text.removesuffix("i").strip(text[0])
        case "pattern":
            yield Kind.OPEN, "("
            yield from _regex_tokens(text.strip("/"))
            yield Kind.CLOSE, ")"
        case "bracket" | "atom":
            yield Kind.ATOM, text
        case "name" | "open" | "close" | "alt" | "count":
            yield Kind[kind.upper()], text


def _regex_tokens(pattern: str) -> Iterator[Token]:
    for found in _REGEX.finditer(pattern):
        if (kind := found.lastgroup) not in (None, "nothing"):
            yield Kind[str(kind).upper()], found.group()


def _is_from_zero(count: str) -> bool:
    """Whether a count allows none."""
    if count[0] in "?*":
        return True
    least = re.match(r"[{~]\s*(\d*)", count)
    return least is not None and not int(least[1][:9] or "0")
