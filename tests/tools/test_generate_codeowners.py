"""CODEOWNERS follows the design documents."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tools.generate_codeowners import (
    DocumentError,
    complaints,
    ownership,
    read_document,
    read_documents,
    render,
)

ROOT: Final = Path(__file__).parents[2]

_MATTER: Final = {
    "title": "Engine",
    "kind": "module",
    "status": "accepted",
    "architecture_state": "current",
    "owners": "['@vllm-omni/engine']",
    "document_stewards": "['@vllm-omni/engine']",
    "primary_code_paths": "[vllm_omni/engine/**]",
    "related_code_paths": "[]",
    "depends_on": "[]",
}


def _write(root: Path, name: str, **changes: str) -> Path:
    path = Path("docs/design/module") / name
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{key}: {value}" for key, value in {**_MATTER, **changes}.items() if value]
    (root / path).write_text("---\n" + "\n".join(lines) + "\n---\n# Text\n")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "vllm_omni/engine").mkdir(parents=True)
    (tmp_path / "vllm_omni/engine/messages.py").touch()
    return tmp_path


def test_the_file_in_the_tree_equals_the_documents() -> None:
    assert complaints(ROOT) == []


def test_every_room_has_an_owner() -> None:
    rules = ownership(ROOT, read_documents(ROOT))
    files = (ROOT / "vllm_omni").rglob("*.py")
    rooms = {f"/vllm_omni/{file.relative_to(ROOT).parts[1]}/" for file in files}

    assert sorted(room for room in rooms if not room.endswith(".py/") and room not in rules) == []


def test_a_folder_comes_before_its_parts_and_shared_paths_have_all_owners(root: Path) -> None:
    _write(
        root,
        "a_contracts.md",
        owners="['@vllm-omni/contracts']",
        primary_code_paths="[vllm_omni/engine/messages.py]",
    )
    _write(root, "b_engine.md")
    _write(root, "c_stages.md", owners="['@vllm-omni/stages']")

    assert ownership(root, read_documents(root)) == {
        "/vllm_omni/engine/": ["@vllm-omni/engine", "@vllm-omni/stages"],
        "/vllm_omni/engine/messages.py": ["@vllm-omni/contracts"],
    }


def test_scoped_owners_are_added_to_the_documents_owners(root: Path) -> None:
    scoped = "[{paths: [vllm_omni/engine/messages.py], owners: ['@vllm-omni/wire']}]"
    _write(root, "engine.md", primary_code_path_owners=scoped)

    assert ownership(root, read_documents(root)) == {
        "/vllm_omni/engine/": ["@vllm-omni/engine"],
        "/vllm_omni/engine/messages.py": ["@vllm-omni/engine", "@vllm-omni/wire"],
    }


def test_a_path_that_does_not_exist_gets_no_rule(root: Path) -> None:
    _write(root, "x.md", primary_code_paths="[vllm_omni/engine/**, vllm_omni/diffusion/**]")

    assert list(ownership(root, read_documents(root))) == ["/vllm_omni/engine/"]


def test_a_difference_is_found(root: Path) -> None:
    _write(root, "engine.md")
    assert complaints(root) == [
        "CODEOWNERS differs from the documents: run tools/generate_codeowners.py"
    ]

    (root / "CODEOWNERS").write_text(render(ownership(root, read_documents(root))))
    assert complaints(root) == []

    _write(root, "engine.md", owners="['@vllm-omni/others']")
    assert len(complaints(root)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"title": ""}, "lacks title"),
        ({"reviewers": "[]"}, "unknown front matter reviewers"),
        ({"owners": "['@somebody']"}, "owner '@somebody' is no team"),
        ({"owners": "[]"}, "owners is empty"),
        ({"primary_code_paths": "vllm_omni"}, "primary_code_paths must be a list of strings"),
    ],
)
def test_wrong_front_matter_is_refused(changes: dict[str, str], message: str, root: Path) -> None:
    path = _write(root, "engine.md", **changes)

    with pytest.raises(DocumentError, match=message):
        read_document(root, path)


def test_a_document_without_front_matter_is_refused(root: Path) -> None:
    path = _write(root, "engine.md")
    (root / path).write_text("# Text\n---\na: 1\n---\n")

    with pytest.raises(DocumentError, match="no front matter"):
        read_document(root, path)


def test_a_dependency_on_no_document_and_a_document_of_nothing_are_found(root: Path) -> None:
    _write(root, "x.md", depends_on="[y]", primary_code_paths="[vllm_omni/gone/**]")
    found = complaints(root)

    assert "docs/design/module/x.md: depends_on names 'y', which is no document" in found
    assert "docs/design/module/x.md: none of its primary_code_paths exists" in found
