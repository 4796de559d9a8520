"""Rows and token ids between frames, numpy and torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from vllm_omni.distributed.omni_connectors.base import Frame


def ids_of(frame: Frame) -> npt.NDArray[np.int64]:
    """Token ids of a frame, as values of our own."""
    return np.frombuffer(frame.payload, dtype="<u4").astype(np.int64)


def rows_of(frame: Frame) -> npt.NDArray[Any]:
    """Captured rows of a frame, copied; bfloat16 as its 16 bits."""
    meta: Mapping[str, Any] = frame.meta
    dtype = np.uint16 if meta["dtype"] == "bfloat16" else np.dtype(meta["dtype"])
    return np.frombuffer(frame.payload, dtype=dtype).reshape(-1, meta["width"]).copy()


def positions_of(frame: Frame) -> npt.NDArray[np.int64]:
    """Rotary positions of a prompt, `[3, tokens]`."""
    return np.frombuffer(frame.payload, dtype="<i4").reshape(3, -1).astype(np.int64)


def positions_in(frame: Frame) -> list[int]:
    """Which positions the rows of a frame stand for."""
    return [first + i for first, count in frame.meta["spans"] for i in range(count)]


def tensor_of(data: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """As a tensor on a device; 16 bits unsigned are bfloat16. The host does not wait for it."""
    import torch

    from vllm_omni.worker.transfer import on_device

    tensor = on_device(np.ascontiguousarray(data), device)
    return tensor.view(torch.bfloat16) if tensor.dtype is torch.uint16 else tensor
