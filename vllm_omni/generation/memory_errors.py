"""Which exceptions mean that memory ran out, whoever raised them.

Every library has its own. They are told by name, so that none has to be imported for the question.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Final

from vllm_omni.platforms import free_cached_memory

_CLASS_NAMES: Final = frozenset({"torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"})
_TEXTS: Final = (
    "out of memory",
    "failed to allocate memory",  # onnxruntime
    "bad_alloc",
    "can't allocate memory",  # PyTorch on CPU
    "cannot allocate memory",
    "alloc_failed",  # cuBLAS, cuDNN
)
_MAX_CAUSES: Final = 8


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the device or of the host; causes count too."""
    return any(_says_so(one) for one in _causes(error))


def halves(count: int) -> Iterator[int]:
    """How many may share a forward in each further attempt of a batch that found no memory.

    The last attempt is one by one, so that one who never finds memory fails alone.
    """
    size = count
    while True:
        size = max(1, size // 2)
        yield size
        if size == 1:
            return


def free_memory() -> None:
    """Collect what a failed forward left behind and give caches back to the device."""
    gc.collect()
    free_cached_memory()


def _says_so(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    kind = type(error)
    if f"{kind.__module__}.{kind.__qualname__}" in _CLASS_NAMES:
        return True
    # Libraries raise their own by these; another exception may quote a client's text.
    is_library = isinstance(error, RuntimeError) or kind.__module__.startswith("onnxruntime")
    return is_library and any(text in str(error).lower() for text in _TEXTS)


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if current is None:
            return
        yield current
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )
