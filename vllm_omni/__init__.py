"""vllm_omni: serve models that read and write text, images, audio and video.

Importing this package is free: public names load on first use, and neither torch nor vLLM
is imported before one of them needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from vllm_omni.version import __version__

if TYPE_CHECKING:
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams
    from vllm_omni.outputs import OmniRequestOutput

_PUBLIC: Final = {
    "AsyncOmni": "vllm_omni.entrypoints.async_omni",
    "Omni": "vllm_omni.entrypoints.omni",
    "OmniDiffusionSamplingParams": "vllm_omni.inputs.diffusion",
    "OmniRequestOutput": "vllm_omni.outputs",
}

__all__ = [
    "AsyncOmni",
    "Omni",
    "OmniDiffusionSamplingParams",
    "OmniRequestOutput",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
