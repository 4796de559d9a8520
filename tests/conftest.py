"""Sorts tests into layers by folder and mark, so that `--layer` runs one of them.

tests/{integration,parity,e2e,dfx}/ are the layers of these names. Of the other folders, which
mirror the source tree, tests marked `slow` or `weights` start processes or load models:
integration. Everything else is a unit test. Wherever a test stands, the mark `thorough` puts it
into the layer of that name, which `make thorough` runs.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

# A run in the background starts with SIGINT ignored, and every process of the tests inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)

FOLDERS: Final = ("integration", "parity", "e2e", "dfx")
LAYERS: Final = ("unit", *FOLDERS, "thorough")
_TESTS: Final = Path(__file__).parent


def layer_of(path: Path, marks: Iterable[str]) -> str:
    """The layer of a test in the file `path`, relative to tests/."""
    folder, names = path.parts[0], set(marks)
    if "thorough" in names:
        return "thorough"
    if folder in FOLDERS:
        return folder
    return "integration" if {"slow", "weights"} & names else "unit"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layer", choices=LAYERS, help="run the tests of this layer only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--layer")
    if wanted is None:
        return
    chosen, others = [], []
    for item in items:
        marks = (mark.name for mark in item.iter_markers())
        layer = layer_of(item.path.relative_to(_TESTS), marks)
        (chosen if layer == wanted else others).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)


@pytest.fixture(autouse=True)
def _package_logger() -> Iterator[None]:
    """What this package says is in `caplog`, whatever was done to loggers in this process before.

    Libraries raise the level of the root logger, which ours inherits; `serve` gives ours vLLM's
    handlers for good, here until the test ends.
    """
    logger = logging.getLogger("vllm_omni")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    logger.setLevel(level or logging.INFO)
    yield
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers
