"""What the layers of a model remember of every request: one table for each layer, a row each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FIRST_CAPACITY = 8


class StateTable:
    """Grows with the requests that are here at once, and keeps what it has grown to."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device = device
        self._tables = [
            torch.zeros(FIRST_CAPACITY, *shape, dtype=dtype, device=device) for shape in shapes
        ]
        self._free = list(range(FIRST_CAPACITY))

    def __repr__(self) -> str:
        return f"<StateTable {self.num_used} of {self.capacity} rows>"

    @property
    def capacity(self) -> int:
        return len(self._tables[0])

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    def allocate(self) -> int:
        """A row of one's own; what it holds is whatever was written last."""
        if not self._free:
            old = self.capacity
            # All or none: without memory for one of them, the tables stay as they are.
            self._tables = [torch.cat([t, torch.zeros_like(t)]) for t in self._tables]
            self._free = list(range(old, 2 * old))
        return self._free.pop()

    def free(self, row: int) -> None:
        self._free.append(row)

    def read(self, rows: Sequence[int]) -> list[Tensor]:
        """Copies of these rows, `[len(rows), ...]` for each layer."""
        index = torch.tensor(rows, device=self._device)
        return [table.index_select(0, index) for table in self._tables]

    def write(self, rows: Sequence[int], states: Sequence[Tensor]) -> None:
        """Put `states` (`[len(rows), ...]` for each layer) into these rows."""
        index = torch.tensor(rows, device=self._device)
        for table, state in zip(self._tables, states, strict=True):
            table.index_copy_(0, index, state)
