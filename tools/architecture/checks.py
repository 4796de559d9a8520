"""Every check by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from tools.architecture import boundaries, endless_waits, layers, model_names, sizes, waiting

CHECKS: Final[dict[str, Callable[[Path], list[str]]]] = {
    "layers": layers.upward_imports,
    "cycles": layers.import_cycles,
    "model-names": model_names.model_names_in_core,
    "sizes": sizes.oversized,
    "broad-excepts": boundaries.broad_excepts,
    "device-calls": boundaries.device_calls,
    "pickling": boundaries.pickling,
    "sleeps": waiting.sleeps,
    "timed-polls": waiting.timed_polls,
    "endless-waits": endless_waits.endless_waits,
    "unbounded-queues": waiting.unbounded_queues,
}
