"""What a pipeline class of diffusers takes and gives, read from its source.

The API process asks, which does not import torch: so the class is parsed, not imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_omni.errors import ConfigError, UnsupportedModelError

INDEX_NAME: Final = "model_index.json"
RESULTS: Final = ("images", "frames", "audios")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Of a class's `__call__`."""

    name: str
    arguments: Mapping[str, object]
    """Their defaults; `REQUIRED` where there is none, None also for what is no literal."""
    result: str | None
    """The field of its output that has the media: one of `RESULTS`."""
    loads_lora: bool


REQUIRED: Final = object()


def signature_of(model_dir: Path) -> Signature:
    """Of the class that a diffusers folder names.

    Raises:
        ConfigError: the folder names no class.
        UnsupportedModelError: diffusers, as it is installed, has no such class.
    """
    path = model_dir / INDEX_NAME
    try:
        name = json.loads(path.read_text(encoding="utf-8")).get("_class_name")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(name, str):
        raise ConfigError(f"{path}: names no pipeline class of diffusers")
    return signature_of_class(name)


@functools.cache
def signature_of_class(name: str) -> Signature:
    """Of one of diffusers' pipeline classes; see `signature_of`."""
    definition = _find(name)
    call = _method(definition, "__call__") if definition else None
    if definition is None or call is None:
        raise UnsupportedModelError(f"diffusers has no pipeline class {name!r}")
    return Signature(
        name=name,
        arguments=_arguments(call),
        result=_result(call),
        loads_lora=any("LoraLoaderMixin" in ast.unparse(base) for base in definition.bases),
    )


def _find(name: str) -> ast.ClassDef | None:
    spec = importlib.util.find_spec("diffusers")
    if spec is None or not name.isidentifier():
        return None
    head = re.compile(rf"^class {name}\b", re.MULTILINE)
    for location in spec.submodule_search_locations or ():
        for path in sorted(Path(location).glob("pipelines/**/*.py")):
            source = path.read_text(encoding="utf-8")
            if head.search(source):
                return _class(ast.parse(source), name)
    return None


def _class(module: ast.Module, name: str) -> ast.ClassDef | None:
    found = (n for n in module.body if isinstance(n, ast.ClassDef) and n.name == name)
    return next(found, None)


def _method(definition: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    found = (n for n in definition.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return next(found, None)


def _arguments(call: ast.FunctionDef) -> Mapping[str, object]:
    positional = call.args.args[1:]
    without = len(positional) - len(call.args.defaults)
    defaults: list[ast.expr | None] = [*([None] * without), *call.args.defaults]
    pairs = [
        *zip(positional, defaults, strict=True),
        *zip(call.args.kwonlyargs, call.args.kw_defaults, strict=True),
    ]
    return {argument.arg: _literal(default) for argument, default in pairs}


def _literal(default: ast.expr | None) -> object:
    if default is None:
        return REQUIRED
    try:
        return ast.literal_eval(default)
    except ValueError:
        return None


def _result(call: ast.FunctionDef) -> str | None:
    keywords = {
        keyword.arg
        for node in ast.walk(call)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call)
        for keyword in node.value.keywords
    }
    return next((name for name in RESULTS if name in keywords), None)
