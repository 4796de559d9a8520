"""Runs the checks named on the command line, or all of them, over this project."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.architecture.checks import CHECKS


def main(names: list[str]) -> int:
    if unknown := set(names) - CHECKS.keys():
        print(f"no such check: {', '.join(sorted(unknown))}; known: {', '.join(CHECKS)}")
        return 2
    root = Path(__file__).resolve().parents[2]
    complaints = [f"{name}: {text}" for name in names or CHECKS for text in CHECKS[name](root)]
    print("\n".join(complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
