"""The files of a new family, from the templates beside this module."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template
from typing import Final

TEMPLATES_DIR: Final = Path(__file__).parent / "templates"
MODELS_DIR: Final = Path("vllm_omni/model_executor/models")
TESTS_DIR: Final = Path("tests/model_executor")
REGISTRY: Final = Path("vllm_omni/config/registry.py")

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_TABLE: Final = re.compile(r"^PIPELINES: .*?^\}$", re.MULTILINE | re.DOTALL)


class SkeletonError(ValueError):
    """The family cannot be written; nothing was."""


def write_family(root: Path, name: str) -> list[Path]:
    """Write folder, tests and registry line of a family; returns the files written.

    Raises:
        SkeletonError: the name is unusable or taken, or the registry has no table.
    """
    if not _NAME.fullmatch(name):
        raise SkeletonError(f"{name!r} is no name for a folder: use a-z, 0-9 and _")
    folder, tests = root / MODELS_DIR / name, root / TESTS_DIR / name
    for path in (folder, tests):
        if path.exists():
            raise SkeletonError(f"{path.relative_to(root)} exists already")
    registry = root / REGISTRY
    table = with_registry_line(registry.read_text(encoding="utf-8"), name)
    written = [registry]
    for template in sorted(TEMPLATES_DIR.rglob("*.tmpl")):
        relative = template.relative_to(TEMPLATES_DIR).with_suffix("")
        target = (folder if relative.parts[0] == "family" else tests) / relative.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_filled(template, name), encoding="utf-8")
        written.append(target)
    registry.write_text(table, encoding="utf-8")
    return written


def with_registry_line(text: str, name: str) -> str:
    """The registry's source with one line more."""
    table = _TABLE.search(text)
    if table is None:
        raise SkeletonError(f"{REGISTRY} has no table PIPELINES")
    if f'"{name}"' in table[0]:
        raise SkeletonError(f"{REGISTRY} has a line for {name!r} already")
    module = ".".join((MODELS_DIR / name / "pipeline").parts)
    at = table.end() - 1
    return f'{text[:at]}    "{name}": "{module}:PIPELINE",\n{text[at:]}'


def _filled(template: Path, name: str) -> str:
    title = name.replace("_", " ").title()
    values = {"name": name, "title": title, "class_name": title.replace(" ", "")}
    return Template(template.read_text(encoding="utf-8")).substitute(values)
