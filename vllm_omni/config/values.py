"""Turning what an operator wrote into a value of the declared type, or saying why it is none.

Values from YAML and Python are checked strictly (no bool for int, no float for int); values from
a command line are text and are parsed by the declared type, with vLLM's number suffixes.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from vllm_omni.config.suggestions import did_you_mean

_SUFFIXES: Final = {
    **{letter: 10 ** (3 * i) for i, letter in enumerate("kmgt", start=1)},
    **{letter: 2 ** (10 * i) for i, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 2 ** (10 * i) for i, letter in enumerate("KMGT", start=1)},
}
_NUMBER: Final = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([kKmMgGtT](?:iB)?)?")
_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0"})
_UNIONS: Final = (typing.Union, types.UnionType)


def convert(value: object, hint: object) -> object:
    """`value` as an instance of `hint`; text is parsed when the type asks for something else.

    Raises:
        ValueError: it is none; the message completes `KEY ...`.
    """
    origin = typing.get_origin(hint)
    if origin in _UNIONS:
        return _to_union(value, typing.get_args(hint))
    if origin is Literal:
        return _to_literal(value, typing.get_args(hint))
    kind = origin or hint
    if kind in _SCALARS:
        return _SCALARS[kind](value)  # type: ignore[index]
    if not isinstance(kind, type) or kind in (object, Any):
        return value
    if issubclass(kind, enum.Enum):
        return _to_enum(value, kind)
    if kind in (list, tuple, set, frozenset, collections.abc.Sequence):
        return _to_collection(value, kind, typing.get_args(hint))
    if issubclass(kind, collections.abc.Mapping):
        return _to_mapping(value, typing.get_args(hint))
    if dataclasses.is_dataclass(kind):
        return _to_record(value, kind)
    return _to_instance(value, kind)


def describe(hint: object) -> str:
    """What a value of this type is called in a message."""
    origin = typing.get_origin(hint)
    if origin in _UNIONS:
        return " or ".join(describe(option) for option in typing.get_args(hint))
    if origin is Literal:
        return f"one of {', '.join(map(str, typing.get_args(hint)))}"
    kind = origin or hint
    if kind in _NAMES:
        return _NAMES[kind]  # type: ignore[index]
    if isinstance(kind, type):
        if issubclass(kind, enum.Enum):
            return f"one of {', '.join(member.name for member in kind)}"
        if issubclass(kind, collections.abc.Mapping) or dataclasses.is_dataclass(kind):
            return "a mapping"
        return f"a {kind.__name__}"
    return "a value"


def _wrong(value: object, hint: object) -> ValueError:
    return ValueError(f"must be {describe(hint)}, got {value!r}")


def _to_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _TRUE | _FALSE:
        return value.strip().lower() in _TRUE
    raise _wrong(value, bool)


def _to_int(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and (match := _NUMBER.fullmatch(value.strip())):
        number = float(match[1]) if "." in match[1] else int(match[1])
        number *= _SUFFIXES[match[2]] if match[2] else 1
        if number == int(number):
            return int(number)
    raise _wrong(value, int)


def _to_float(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    raise _wrong(value, float)


def _to_str(value: object) -> str:
    if isinstance(value, str):
        return value
    raise _wrong(value, str)


def _to_none(value: object) -> None:
    if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null")):
        return
    raise _wrong(value, None)


def _to_union(value: object, options: tuple[object, ...]) -> object:
    # None before text, and text last: "none" and "512" are text as well.
    ordered = sorted(options, key=lambda o: (o is not types.NoneType, o is str))
    if isinstance(value, str) and str in options and list in map(typing.get_origin, options):
        ordered = [o for o in ordered if typing.get_origin(o) is not list or value[:1] == "["]
    for option in ordered:
        try:
            return convert(value, option)
        except ValueError as exc:
            reason = exc
    records = [o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)]
    if records and isinstance(value, Mapping):
        raise reason
    raise ValueError(
        f"must be {' or '.join(describe(option) for option in options)}, got {value!r}"
    )


def _to_literal(value: object, options: tuple[object, ...]) -> object:
    for option in options:
        if type(option) is type(value) and option == value:
            return option
        if isinstance(value, str) and str(option) == value:
            return option
    hint = did_you_mean(str(value), map(str, options))
    raise ValueError(f"must be one of {', '.join(map(str, options))}; got {value!r}{hint}")


def _to_enum(value: object, kind: type[enum.Enum]) -> enum.Enum:
    if isinstance(value, kind):
        return value
    for member in kind:
        if value == member.value or str(value).upper() in (member.name.upper(), str(member.value)):
            return member
    names = [member.name for member in kind]
    hint = did_you_mean(str(value), names)
    raise ValueError(f"must be one of {', '.join(names)}; got {value!r}{hint}")


def _to_collection(value: object, kind: type, args: tuple[object, ...]) -> object:
    """A JSON list, a list, or a single item that stands alone."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parse_json(value)
    if isinstance(value, Mapping):
        raise ValueError(f"must be a list, got {value!r}")
    items = list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
    item_hint = args[0] if args else object
    converted = [convert(item, item_hint) for item in items]
    return converted if kind is collections.abc.Sequence else kind(converted)


def _to_mapping(value: object, args: tuple[object, ...]) -> dict[object, object]:
    if isinstance(value, str):
        value = _parse_json(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping, got {value!r}")
    item_hint = args[1] if len(args) > 1 else object
    return {key: convert(item, item_hint) for key, item in value.items()}


def _to_record(value: object, kind: type[Any]) -> object:
    """A mapping whose names are fields of a vLLM config class, checked by that class itself."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        value = _parse_json(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping, got {value!r}")
    known = [field.name for field in dataclasses.fields(kind)]
    for name in value:
        if name not in known:
            raise ValueError(f"has no field {name!r}{did_you_mean(str(name), known)}")
    from pydantic import TypeAdapter, ValidationError

    try:
        TypeAdapter(kind).validate_python(dict(value))
    except ValidationError as exc:
        first = exc.errors()[0]
        where = "".join(f".{part}" for part in first["loc"])
        raise ValueError(f"is wrong at '{where}': {first['msg']}") from exc
    return dict(value)


def _to_instance(value: object, kind: type) -> object:
    if isinstance(value, kind):
        return value
    raise _wrong(value, kind)


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as exc:
        raise ValueError(f"must be JSON ({exc.msg} at character {exc.pos}), got {text!r}") from exc


_SCALARS: Final[dict[object, Callable[[object], object]]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
    None: _to_none,
    types.NoneType: _to_none,
}
_NAMES: Final[dict[object, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    None: "none",
    types.NoneType: "none",
    list: "a list",
    tuple: "a list",
    set: "a list",
}
