"""Writes a tiny random checkpoint of a model family: `python tools/make_tiny.py FAMILY OUT_DIR`.

A family takes part by having a module `tiny` with `make_tiny(out_dir, seed)` in its folder. One
with several kinds of checkpoint names them in `VARIANTS`, the usual one first, and also takes
`variant`. `--scale real` writes the released sizes without weights, for stages with
`load_format: dummy`, where a family has a `make_real(out_dir)` there or in a module
`real`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
MODEL_ROOMS: Final = ("vllm_omni/model_executor/models", "vllm_omni/diffusion/models")


def families() -> dict[str, str]:
    """Families that can make a tiny checkpoint, and the module that does."""
    found = sorted(path for room in MODEL_ROOMS for path in (ROOT / room).glob("*/tiny.py"))
    return {
        path.parent.name: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in found
    }


def make_real(family: str, modules: dict[str, str], out_dir: Path) -> int:
    """Write the released sizes of a family that has them."""
    tiny = modules[family]
    for name in (tiny.removesuffix("tiny") + "real", tiny):
        if importlib.util.find_spec(name) is None:
            continue
        module = importlib.import_module(name)
        if hasattr(module, "make_real"):
            print(module.make_real(out_dir))
            return 0
    print(f"make_tiny: {family} has no real size", file=sys.stderr)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a tiny random checkpoint of a family.")
    modules = families()
    parser.add_argument("family", choices=sorted(modules))
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", choices=("tiny", "real"), default="tiny")
    parser.add_argument("--variant", help="kind of checkpoint, for families with several")
    arguments = parser.parse_args()
    if arguments.out_dir.exists() and (
        not arguments.out_dir.is_dir() or any(arguments.out_dir.iterdir())
    ):
        print(f"make_tiny: {arguments.out_dir} exists and is not an empty folder", file=sys.stderr)
        return 1
    if arguments.scale == "real":
        return make_real(arguments.family, modules, arguments.out_dir)
    module = importlib.import_module(modules[arguments.family])
    options = {}
    if arguments.variant is not None:
        variants = vars(module).get("VARIANTS", ())
        if arguments.variant not in variants:
            known = ", ".join(variants) or "none"
            parser.error(f"--variant {arguments.variant}: {arguments.family} has {known}")
        options["variant"] = arguments.variant
    print(module.make_tiny(arguments.out_dir, arguments.seed, **options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
