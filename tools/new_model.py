"""Writes the skeleton of a model family and its tests: `tools/new_model.py NAME`.

A text stage that speaks through a one-shot stage. It runs as it is; replace the parts.
docs/add_a_model.md says how to go on.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from string import Template
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TEMPLATES_DIR: Final = Path(__file__).parent / "new_model_templates"
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="folder and model_type of the family: a-z, 0-9 and _")
    try:
        written = write_family(ROOT, parser.parse_args().name)
    except SkeletonError as error:
        print(f"new_model: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(path.relative_to(ROOT))
    print("docs/add_a_model.md says what to do next")
    return 0


if __name__ == "__main__":
    sys.exit(main())
