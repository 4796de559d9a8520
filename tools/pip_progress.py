"""Turns pip's output into short progress: `pip install ... 2>&1 | pip_progress.py LOGFILE`.

Everything goes to the log. The screen shows one running line on a terminal, a line for every
large download and every fifty packages elsewhere, and pip's errors; on an error also the log's end.
Runs before anything is installed, so it uses the standard library alone.
"""

from __future__ import annotations

import collections
import re
import sys
import time
from collections.abc import Iterable
from typing import Final, TextIO

_COLLECTING: Final = re.compile(r"^Collecting (\S+)")
_DOWNLOADING: Final = re.compile(r"^\s+(?:Downloading|Using cached) (\S+) \(([\d.]+) ([kMG]B)\)")
_ERROR: Final = re.compile(r"^\s*(ERROR|error):?")
_NUM_TAIL_LINES: Final = 15


class Progress:
    """Counts what pip reports and says it, briefly."""

    def __init__(self, screen: TextIO, *, is_terminal: bool, clock_start: float) -> None:
        self._screen = screen
        self._is_terminal = is_terminal
        self._start = clock_start
        self._num_packages = 0
        self.has_failed = False

    def feed(self, line: str, now: float) -> None:
        if match := _COLLECTING.match(line):
            self._num_packages += 1
            self._show(match[1], now, keep=self._num_packages % 50 == 0)
        elif match := _DOWNLOADING.match(line):
            is_large = match[3] == "GB" or (match[3] == "MB" and float(match[2]) >= 20)
            self._show(f"{match[1]} ({match[2]} {match[3]})", now, keep=is_large)
        elif line.startswith("Installing collected packages"):
            num = line.count(",") + 1
            self._show(f"unpacking {num} packages (the longest step, no further news)", now, True)
        elif line.startswith(("Building wheel", "Preparing metadata")):
            self._show(line.strip(), now, keep=False)
        elif _ERROR.match(line):
            self.has_failed = True
            self._write(line, keep=True)

    def close(self, now: float) -> None:
        self._write(f"    {now - self._start:5.0f} s  done", keep=True)

    def _show(self, text: str, now: float, keep: bool) -> None:
        if self._is_terminal or keep:
            elapsed_s = now - self._start
            self._write(f"    {elapsed_s:5.0f} s  {self._num_packages:3d} packages  {text}", keep)

    def _write(self, text: str, keep: bool) -> None:
        if self._is_terminal:
            self._screen.write(f"\r\x1b[K{text[:110]}" + ("\n" if keep else ""))
        else:
            self._screen.write(text + "\n")
        self._screen.flush()


def follow(lines: Iterable[str], log: TextIO, progress: Progress) -> list[str]:
    """Feed every line to the log and to the progress; returns the last lines."""
    tail: collections.deque[str] = collections.deque(maxlen=_NUM_TAIL_LINES)
    for raw in lines:
        line = raw.rstrip("\n")
        log.write(line + "\n")
        if line.startswith("WARNING: Location ") and "is ignored" in line:
            continue
        tail.append(line)
        progress.feed(line, time.monotonic())
    return list(tail)


def main() -> None:
    progress = Progress(sys.stdout, is_terminal=sys.stdout.isatty(), clock_start=time.monotonic())
    with open(sys.argv[1], "a", encoding="utf-8") as log:
        tail = follow(sys.stdin, log, progress)
    if progress.has_failed:
        print("\n".join(tail), file=sys.stderr)
    else:
        progress.close(time.monotonic())


if __name__ == "__main__":
    main()
