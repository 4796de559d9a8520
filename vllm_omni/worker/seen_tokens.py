"""Repetition penalties of a conditioned stage, from a table on the device.

vLLM's first runner brings every token that every request has written to the device at each step: it
waits for the step before, and the cost grows with the length of what was said. Here each request
has a row that says which tokens it has met; a step reads it and marks one more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

_FIRST_ROWS: Final = 32
_SCRATCH: Final = 0
"""The row of requests without a penalty, and of steps that sampled nothing."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Requests in the order of a step, on the device."""

    request_ids: tuple[str, ...]
    rows: torch.Tensor
    """`[B]`"""
    penalties: torch.Tensor
    """`[B, 1]`"""


class SeenTokens:
    """B requests, V tokens."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._seen = torch.zeros(_FIRST_ROWS, vocab_size, dtype=torch.bool, device=device)
        self._free = list(range(_FIRST_ROWS - 1, _SCRATCH, -1))
        self._rows: dict[str, int] = {}
        self._penalties: dict[str, float] = {}
        self._batch: _Batch | None = None

    def __repr__(self) -> str:
        return f"<SeenTokens requests={len(self._rows)} rows={self._seen.shape[0]}>"

    def add(self, request_id: str, prompt: Sequence[int], penalty: float) -> None:
        """Watch a request; the tokens of its prompt count."""
        if not self._free:
            num_rows = self._seen.shape[0]
            self._seen = torch.cat([self._seen, torch.zeros_like(self._seen)])
            self._free += range(2 * num_rows - 1, num_rows - 1, -1)
        self._rows[request_id] = row = self._free.pop()
        self._penalties[request_id] = penalty
        self._seen[row] = False
        self._seen[row, sorted(set(prompt))] = True
        self._batch = None

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forget requests; those never watched are ignored."""
        for request_id in request_ids:
            row = self._rows.pop(request_id, None)
            if row is not None:
                del self._penalties[request_id]
                self._free.append(row)
                self._batch = None

    def penalised(self, logits: torch.Tensor, request_ids: Sequence[str]) -> torch.Tensor:
        """Logits `[B, V]` of these requests, in float32, as transformers penalises them."""
        if not self._rows:
            return logits
        batch = self._in_order(request_ids)
        logits = logits.float()
        scale = torch.where(self._seen.index_select(0, batch.rows), batch.penalties, 1.0)
        return torch.where(logits > 0, logits / scale, logits * scale)

    def note(
        self, token_ids: torch.Tensor, request_ids: Sequence[str], has_sampled: Sequence[bool]
    ) -> None:
        """Mark what each request has sampled: `[B]`."""
        if not self._rows:
            return
        batch = self._in_order(request_ids)
        rows = batch.rows
        if not all(has_sampled):
            rows = rows.masked_fill(self._on_device(~torch.tensor(has_sampled)), _SCRATCH)
        self._seen[rows, token_ids.long()] = True

    def _in_order(self, request_ids: Sequence[str]) -> _Batch:
        wanted = tuple(request_ids)
        if self._batch is None or self._batch.request_ids != wanted:
            rows = torch.tensor([self._rows.get(one, _SCRATCH) for one in wanted])
            penalties = torch.tensor([[self._penalties.get(one, 1.0)] for one in wanted])
            self._batch = _Batch(wanted, self._on_device(rows), self._on_device(penalties))
        return self._batch

    def _on_device(self, values: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return values
        return values.pin_memory().to(self._device, non_blocking=True)
