"""Bounds on what glibc keeps of freed memory in the API process.

Left alone it gives each of our threads a heap of its own, and a heap keeps what its largest burst
took: a buffer of a recording that was freed long ago stays resident once for each thread that ever
decoded one. It also raises, with every large block that is freed, the size from which a block is
mapped by itself and goes back to the system when it is freed.

Replicas are processes of their own and keep glibc's defaults.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Final

MAX_HEAPS: Final = 2
"""Threads here take turns at the interpreter: more heaps serve no one."""
MAPPED_FROM_BYTES: Final = 512 << 10
"""Blocks of this size go back to the system when they are freed."""
KEPT_BYTES: Final = 4 << 20
"""Free memory at the end of the main heap beyond this goes back too."""
_OPTIONS: Final = ((-8, MAX_HEAPS), (-3, MAPPED_FROM_BYTES), (-1, KEPT_BYTES))
"""By the numbers of `malloc.h`: M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD."""


def bound_heaps(environment: Mapping[str, str] = os.environ) -> bool:
    """Set the bounds, before threads are started; whether all were taken.

    Nothing is set where the operator has set an option, or with another allocator than glibc's.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in environment):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(number, value) for number, value in _OPTIONS)
