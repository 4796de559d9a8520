"""Repairs what vLLM's CPU build brings but cannot load.

Run as `python -m vllm_omni.vllm_compat.environment`.

Why:      vLLM's CPU package depends on torchvision, torchaudio and torchcodec builds that may want
          CUDA libraries. transformers imports all three when they are installed, and with a broken
          one every model class of it fails to import.
Why not a subclass: it is the environment that is wrong, before any code of ours runs.
Breaks if: transformers comes to need torchaudio or torchcodec for a model that is served.
Remove when: the CPU wheels of vLLM depend on builds that match their torch.

Part of `make setup`; safe to run again; changes nothing where the three load.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final

from vllm_omni.errors import VersionError
from vllm_omni.version import check_vllm, installed_vllm
from vllm_omni.vllm_compat.torchvision_ops import pth_path, write_pth

REMOVABLE: Final = ("torchaudio", "torchcodec")
"""Nothing here needs them; torchvision is kept and repaired, video processors import it."""

_IMPORT_TIMEOUT_S: Final = 120.0


def is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def import_error(package: str, env: Mapping[str, str] | None = None) -> str | None:
    """What importing `package` in a fresh interpreter ends in; None when it loads."""
    result = subprocess.run(
        [sys.executable, "-c", f"import {package}"],
        capture_output=True,
        text=True,
        timeout=_IMPORT_TIMEOUT_S,
        env=env,
        check=False,
    )
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines()
    return textwrap.shorten(lines[-1], 90) if lines else f"exit code {result.returncode}"


def uninstall(packages: Sequence[str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *packages],
        check=True,
    )


def repair() -> list[str]:
    """Make transformers importable; returns one line for each thing that was done."""
    done = []
    broken = {
        name: error
        for name in REMOVABLE
        if is_installed(name) and (error := import_error(name)) is not None
    }
    if broken:
        uninstall(list(broken))
        done += [f"removed {name}, which cannot load here: {e}" for name, e in broken.items()]
    needs_hook = is_installed("torchvision") and (
        pth_path().exists() or import_error("torchvision") is not None
    )
    if needs_hook and write_pth():
        done.append("torchvision's compiled part cannot load here; installed its import hook")
    return done


def main() -> int:
    try:
        check_vllm()
    except VersionError as error:
        print(error, file=sys.stderr)
        return 1
    for line in repair():
        print(f"    {line}")
    if is_installed("torchvision") and (why := import_error("torchvision")) is not None:
        print(f"torchvision still does not load: {why}", file=sys.stderr)
        return 1
    print(f"    vLLM {installed_vllm()}, torch {importlib.metadata.version('torch')}: ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
