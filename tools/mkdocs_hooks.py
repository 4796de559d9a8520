"""What the site takes from the code: the design documents' navigation and the table of metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from tools.generate_codeowners import read_documents
from vllm_omni.metrics import names

SECTION: Final = "Design by room"
METRICS_MARK: Final = "<!-- every series of vllm_omni/metrics/names.py -->"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add every document of docs/design/module/ by its title."""
    root = Path(config.config_file_path).parent
    pages = [
        {document.title: str(document.path.relative_to("docs"))}
        for document in read_documents(root)
    ]
    if config.nav is not None and pages:
        config.nav.append({SECTION: pages})
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the table of metrics in the place of its mark."""
    return markdown.replace(METRICS_MARK, metrics_table())


def metrics_table() -> str:
    """Every series as a row."""
    rows = ["| series | kind | labels | |", "|---|---|---|---|"]
    series = [value for value in vars(names).values() if isinstance(value, names.Series)]
    for one in sorted(series, key=lambda one: one.name):
        suffix = "_total" if one.kind is names.Kind.COUNTER else ""
        labels = ", ".join(f"`{label}`" for label in one.labels)
        rows.append(f"| `{names.PREFIX}{one.name}{suffix}` | {one.kind} | {labels} | {one.help} |")
    return "\n".join(rows)
