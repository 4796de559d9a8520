"""Writes a tiny random checkpoint of a model family: `python tools/make_tiny.py FAMILY OUT_DIR`.

A family takes part by having a module `tiny` with `make_tiny(out_dir, seed)` in its folder; one
with `make_real(out_dir)` can also write its released sizes without weights (`--scale real`), for
runs with random ones.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Final

MODELS_DIR: Final = Path(__file__).resolve().parents[1] / "vllm_omni/model_executor/models"


def families() -> list[str]:
    """Families that can make a tiny checkpoint."""
    return sorted(path.parent.name for path in MODELS_DIR.glob("*/tiny.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a tiny random checkpoint of a family.")
    parser.add_argument("family", choices=families())
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", choices=("tiny", "real"), default="tiny")
    arguments = parser.parse_args()
    if arguments.out_dir.exists() and (
        not arguments.out_dir.is_dir() or any(arguments.out_dir.iterdir())
    ):
        print(f"make_tiny: {arguments.out_dir} exists and is not an empty folder", file=sys.stderr)
        return 1
    module = importlib.import_module(f"vllm_omni.model_executor.models.{arguments.family}.tiny")
    if arguments.scale == "tiny":
        print(module.make_tiny(arguments.out_dir, arguments.seed))
        return 0
    if not hasattr(module, "make_real"):
        print(f"make_tiny: {arguments.family} has one size only", file=sys.stderr)
        return 1
    print(module.make_real(arguments.out_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
