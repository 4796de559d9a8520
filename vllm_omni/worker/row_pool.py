"""Rows of one width for many requests, in one tensor: written and read by a single indexed copy.

A request's rows live in pages, by position, until it ends: a preempted request is computed again
from them. Page tables are on the host, so an index costs no look at the device.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from vllm_omni.worker.transfer import on_device

PAGE_ROWS: Final = 64
REST_ROW: Final = 0
"""The model's constant condition."""
SCRATCH_ROW: Final = 1
"""Takes writes that nobody reads."""

Indices = npt.NDArray[np.int64]


class RowSequence:
    """The rows of one request, by position."""

    __slots__ = ("length", "pages")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.length = 0


class RowPool:
    """Grows by doubling; what a request gives back is used again."""

    def __init__(
        self, width: int, dtype: torch.dtype, device: torch.device, num_pages: int
    ) -> None:
        self.rows = torch.zeros((1 + num_pages) * PAGE_ROWS, width, dtype=dtype, device=device)
        self._free = list(range(num_pages, 0, -1))  # page 0 holds the constant rows

    def __repr__(self) -> str:
        return f"<RowPool pages={self.rows.shape[0] // PAGE_ROWS - 1} free={len(self._free)}>"

    @property
    def num_used_pages(self) -> int:
        return self.rows.shape[0] // PAGE_ROWS - 1 - len(self._free)

    def reserve(self, sequence: RowSequence, length: int) -> None:
        """Make room for positions below `length`, and count them as there."""
        while len(sequence.pages) * PAGE_ROWS < length:
            if not self._free:
                self._grow()
            sequence.pages.append(self._free.pop())
        sequence.length = max(sequence.length, length)

    def index(self, sequence: RowSequence, position: int) -> int:
        """Where the row of a position lies."""
        return sequence.pages[position // PAGE_ROWS] * PAGE_ROWS + position % PAGE_ROWS

    def indices(self, sequence: RowSequence, first: int, count: int) -> Indices:
        """Where the rows of `count` positions from `first` lie."""
        positions = np.arange(first, first + count)
        pages = np.asarray(sequence.pages, dtype=np.int64)
        found: Indices = pages[positions // PAGE_ROWS] * PAGE_ROWS + positions % PAGE_ROWS
        return found

    def extend(self, sequence: RowSequence, count: int) -> Indices:
        """Where the rows of a request's next positions are to lie."""
        first = sequence.length
        self.reserve(sequence, first + count)
        return self.indices(sequence, first, count)

    def write(self, indices: Indices, rows: torch.Tensor) -> None:
        """Write rows where `indices` says."""
        self.rows.index_copy_(0, on_device(indices, self.rows.device), rows.to(self.rows.dtype))

    def read(self, indices: Indices) -> torch.Tensor:
        """The rows where `indices` says."""
        return self.rows.index_select(0, on_device(indices, self.rows.device))

    def release(self, sequence: RowSequence) -> None:
        """Give a request's pages back."""
        self._free += reversed(sequence.pages)
        sequence.pages = []
        sequence.length = 0

    def _grow(self) -> None:
        num_rows = self.rows.shape[0]
        self.rows = torch.cat([self.rows, torch.zeros_like(self.rows)])
        self._free += range(2 * num_rows // PAGE_ROWS - 1, num_rows // PAGE_ROWS - 1, -1)
