"""What documents tell people to type is well-formed, and configuration is accepted."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Final

import pytest

from vllm_omni.config.registry import load_pipeline
from vllm_omni.config.schema import Schema
from vllm_omni.config.yaml_source import read_deploy

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks(language: str) -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(ROOT)}", text)
        for page in PAGES
        for found, text in _BLOCK.findall(page.read_text(encoding="utf-8"))
        if found == language
    ]


def test_python_in_documents_parses() -> None:
    blocks = _blocks("python")

    assert len(blocks) >= 3
    for page, text in blocks:
        ast.parse(text, page)


def test_json_in_documents_parses() -> None:
    blocks = _blocks("json")

    assert blocks
    for _, text in blocks:
        json.loads(text)


def test_json_in_curl_lines_parses() -> None:
    bodies = [
        body for _, text in _blocks("bash") for body in re.findall(r"-d '(.*?)'", text, re.DOTALL)
    ]

    assert bodies
    for body in bodies:
        json.loads(body)


@pytest.mark.parametrize(("page", "text"), _blocks("yaml"))
def test_deploy_files_in_documents_are_accepted(page: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text(text)
    schema = Schema(load_pipeline("smol_voice"))

    for setting in read_deploy(path):
        schema.value(setting, schema.field(setting))
