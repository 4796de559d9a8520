"""Command line of the skeleton writer."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from tools.new_model.write import SkeletonError, write_family

ROOT: Final = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.new_model",
        description="Write the skeleton of a model family: a text stage that speaks through a "
        "one-shot stage, with its tests. It runs as it is; replace the parts.",
    )
    parser.add_argument("name", help="folder and model_type of the family: letters, digits and _")
    try:
        written = write_family(ROOT, parser.parse_args().name)
    except SkeletonError as error:
        print(f"new_model: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(path.relative_to(ROOT))
    print("docs/add_a_model.md says what to do next")
    return 0


if __name__ == "__main__":
    sys.exit(main())
