"""A sender's and a receiver's side that have not met yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.sides import Side


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[Side, Side]]:
    thinker = Side("thinker/0", f"ipc://{tmp_path}/a")
    voice = Side("voice/0", f"ipc://{tmp_path}/b")
    yield thinker, voice
    thinker.connector.close()
    voice.connector.close()
