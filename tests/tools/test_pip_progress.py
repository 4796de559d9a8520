"""Set-up says what it does in a few lines, and everything when it failed."""

from __future__ import annotations

import io
from typing import Final

from tools.pip_progress import Progress, follow

OUTPUT: Final = [
    "WARNING: Location 'file:///x' is ignored: it is neither a file nor a directory.\n",
    "Collecting torch==2.13.0\n",
    "  Downloading torch-2.13.0.whl (191.8 MB)\n",
    "Collecting tiny\n",
    "  Downloading tiny-1.whl (12 kB)\n",
    "Installing collected packages: tiny, torch\n",
]


def _run(lines: list[str], *, is_terminal: bool = False) -> tuple[str, str, Progress, list[str]]:
    screen, log = io.StringIO(), io.StringIO()
    progress = Progress(screen, is_terminal=is_terminal, clock_start=0.0)
    tail = follow(lines, log, progress)
    return screen.getvalue(), log.getvalue(), progress, tail


def test_large_downloads_and_the_unpacking_are_shown_and_all_is_logged() -> None:
    screen, log, progress, _ = _run(OUTPUT)

    assert [line.split("packages  ")[1] for line in screen.splitlines()] == [
        "torch-2.13.0.whl (191.8 MB)",
        "unpacking 2 packages (the longest step, no further news)",
    ]
    assert log == "".join(OUTPUT)
    assert not progress.has_failed


def test_a_terminal_gets_one_running_line() -> None:
    screen, *_ = _run(OUTPUT[1:2], is_terminal=True)

    assert screen.startswith("\r")
    assert "torch==2.13.0" in screen
    assert "\n" not in screen


def test_an_error_is_shown_and_the_end_of_the_log_kept() -> None:
    screen, _, progress, tail = _run([*OUTPUT, "ERROR: No matching distribution found for x\n"])

    assert progress.has_failed
    assert "ERROR: No matching distribution found for x" in screen
    assert tail[-1] == "ERROR: No matching distribution found for x"
    assert not any(line.startswith("WARNING: Location") for line in tail)
