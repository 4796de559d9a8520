"""Writes CODEOWNERS from the front matter of docs/design/module/**.md; `--check` only compares.

A rule is never written by hand: change the document that owns the path, then run this. A rule
exists for every primary path that exists. When two documents own the same path, or a document
adds owners for a part of it (`primary_code_path_owners`), the owners follow in order. GitHub lets
the last matching rule win, so rules are sorted: a folder comes before what lies in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
DOCUMENTS_DIR: Final = Path("docs/design/module")
OUTPUT: Final = Path("CODEOWNERS")
DEFAULT_OWNER: Final = "@vllm-omni/maintainers"

REQUIRED_KEYS: Final = (
    "title",
    "kind",
    "status",
    "architecture_state",
    "owners",
    "document_stewards",
    "primary_code_paths",
    "related_code_paths",
    "depends_on",
)
OPTIONAL_KEYS: Final = ("primary_code_path_owners",)

_HEADER: Final = """\
# Written by tools/generate_codeowners.py from the front matter of docs/design/module/.
# Do not edit: change the owning document and run the script. The last matching rule wins.
"""


class DocumentError(ValueError):
    """A document's front matter cannot be used; the message names document and key."""


@dataclass(frozen=True, slots=True)
class Document:
    """The front matter of one design document, as far as ownership needs it."""

    path: Path
    """Relative to the project's root."""
    title: str
    owners: tuple[str, ...]
    primary: tuple[str, ...]
    scoped: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    """(paths, owners) that add owners for a part of the primary paths."""
    depends_on: tuple[str, ...]
    related: tuple[str, ...]

    @property
    def name(self) -> str:
        """How `depends_on` names it: the path below docs/design/module without suffix."""
        return str(self.path.relative_to(DOCUMENTS_DIR).with_suffix(""))


def front_matter(text: str, name: Path) -> Mapping[str, object]:
    """The YAML block between the first two `---` lines."""
    _, start, rest = text.partition("---\n")
    block, end, _ = rest.partition("\n---\n")
    if not start or not end or not text.startswith(start):
        raise DocumentError(f"{name}: no front matter between two lines of ---")
    values = yaml.safe_load(block)
    if not isinstance(values, dict):
        raise DocumentError(f"{name}: front matter is no mapping")
    return values


def _strings(values: Mapping[str, object], key: str, name: Path) -> tuple[str, ...]:
    value = values.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DocumentError(f"{name}: {key} must be a list of strings")
    return tuple(value)


def _owners(values: Mapping[str, object], name: Path) -> tuple[str, ...]:
    owners = _strings(values, "owners", name)
    for owner in owners:
        if not owner.startswith("@vllm-omni/"):
            raise DocumentError(f"{name}: owner {owner!r} is no team of @vllm-omni/")
    return owners


def read_document(root: Path, path: Path) -> Document:
    """Parse and check one document."""
    values = front_matter((root / path).read_text(encoding="utf-8"), path)
    if missing := [key for key in REQUIRED_KEYS if key not in values]:
        raise DocumentError(f"{path}: front matter lacks {', '.join(missing)}")
    if unknown := [key for key in values if key not in (*REQUIRED_KEYS, *OPTIONAL_KEYS)]:
        raise DocumentError(f"{path}: unknown front matter {', '.join(unknown)}")
    owners = _owners(values, path)
    if not owners:
        raise DocumentError(f"{path}: owners is empty")
    scoped = values.get("primary_code_path_owners", [])
    if not isinstance(scoped, list):
        raise DocumentError(f"{path}: primary_code_path_owners must be a list")
    return Document(
        path=path,
        title=str(values["title"]),
        owners=owners,
        primary=_strings(values, "primary_code_paths", path),
        scoped=tuple((_strings(s, "paths", path), _owners(s, path)) for s in scoped),
        depends_on=_strings(values, "depends_on", path),
        related=_strings(values, "related_code_paths", path),
    )


def read_documents(root: Path) -> list[Document]:
    """Every document with front matter rules, by path; `index.md` of the folder itself is none."""
    paths = sorted((root / DOCUMENTS_DIR).rglob("*.md"))
    return [
        read_document(root, path.relative_to(root))
        for path in paths
        if path != root / DOCUMENTS_DIR / "index.md"
    ]


def _plain(pattern: str) -> str:
    return pattern.strip("/").removesuffix("/**")


def exists(root: Path, pattern: str) -> bool:
    """Whether a file matches; a folder counts when something but compiled files lies in it."""
    return any(
        path.is_file() or any(p.is_file() and p.suffix != ".pyc" for p in path.rglob("*"))
        for path in root.glob(_plain(pattern))
    )


def rule_pattern(root: Path, pattern: str) -> str:
    """`vllm_omni/engine/**` and `vllm_omni/engine` both become `/vllm_omni/engine/`."""
    plain = _plain(pattern)
    return f"/{plain}/" if (root / plain).is_dir() else f"/{plain}"


def ownership(root: Path, documents: Iterable[Document]) -> dict[str, list[str]]:
    """Pattern to effective owners, broad patterns first."""
    rules: dict[str, list[str]] = {}

    def add(patterns: Sequence[str], owners: Sequence[str]) -> None:
        for pattern in patterns:
            if exists(root, pattern):
                known = rules.setdefault(rule_pattern(root, pattern), [])
                known += [owner for owner in owners if owner not in known]

    for document in documents:
        add(document.primary, document.owners)
    for document in documents:
        for patterns, owners in document.scoped:
            add(patterns, (*document.owners, *owners))
    return dict(sorted(rules.items()))


def render(rules: Mapping[str, Sequence[str]]) -> str:
    rows = [("*", [DEFAULT_OWNER]), *rules.items()]
    lines = [f"{pattern} {' '.join(owners)}" for pattern, owners in rows]  # unaligned: small diffs
    return _HEADER + "\n".join(lines) + "\n"


def complaints(root: Path) -> list[str]:
    """What is wrong: unusable documents, or a CODEOWNERS that differs from them."""
    try:
        documents = read_documents(root)
    except DocumentError as error:
        return [str(error)]
    names = {document.name for document in documents}
    found = [
        f"{document.path}: depends_on names {name!r}, which is no document"
        for document in documents
        for name in document.depends_on
        if name not in names
    ]
    found += [
        f"{document.path}: none of its primary_code_paths exists"
        for document in documents
        if not any(exists(root, pattern) for pattern in document.primary)
    ]
    written = (root / OUTPUT).read_text(encoding="utf-8") if (root / OUTPUT).exists() else ""
    if written != render(ownership(root, documents)):
        found.append(f"{OUTPUT} differs from the documents: run tools/generate_codeowners.py")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    if parser.parse_args().check:
        found = complaints(ROOT)
        print("\n".join(found), end="\n" if found else "")
        return 1 if found else 0
    (ROOT / OUTPUT).write_text(render(ownership(ROOT, read_documents(ROOT))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
