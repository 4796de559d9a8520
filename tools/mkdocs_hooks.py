"""Adds every document of docs/design/module/ to the site's navigation, by its title."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig

from tools.generate_codeowners import read_documents

SECTION: Final = "Design by room"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    root = Path(config.config_file_path).parent
    pages = [
        {document.title: str(document.path.relative_to("docs"))}
        for document in read_documents(root)
    ]
    if config.nav is not None and pages:
        config.nav.append({SECTION: pages})
    return config
