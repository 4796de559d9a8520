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
    """B requests, V tokens. Begins with room for `max_requests`; more come with preemption."""

    def __init__(self, vocab_size: int, max_requests: int, device: torch.device) -> None:
        self._device = device
        num_rows = max_requests + 1
        self.table = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=device)
        """`[rows, V]`: another tensor after it had to grow."""
        self._free = list(range(num_rows - 1, _SCRATCH, -1))
        self._rows: dict[str, int] = {}
        self._penalties: dict[str, float] = {}
        self._batch: _Batch | None = None

    def __repr__(self) -> str:
        return f"<SeenTokens requests={len(self._rows)} rows={self.table.shape[0]}>"

    def add(self, request_id: str, prompt: Sequence[int], penalty: float) -> None:
        """Watch a request; the tokens of its prompt count."""
        if not self._free:
            num_rows = self.table.shape[0]
            self.table = torch.cat([self.table, torch.zeros_like(self.table)])
            self._free += range(2 * num_rows - 1, num_rows - 1, -1)
        self._rows[request_id] = row = self._free.pop()
        self._penalties[request_id] = penalty
        self.table[row] = False
        self.table[row, sorted(set(prompt))] = True
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
        rows, penalties = self.in_order(request_ids)
        return penalised(logits, self.table.index_select(0, rows), penalties)

    def note(
        self, token_ids: torch.Tensor, request_ids: Sequence[str], has_sampled: Sequence[bool]
    ) -> None:
        """Mark what each request has sampled: `[B]`."""
        if not self._rows:
            return
        rows, _ = self.in_order(request_ids)
        if not all(has_sampled):
            rows = rows.masked_fill(self._on_device(~torch.tensor(has_sampled)), _SCRATCH)
        self.table[rows, token_ids.long()] = True

    def in_order(self, request_ids: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[B]` and penalties `[B, 1]` of requests, 1 for those not watched."""
        wanted = tuple(request_ids)
        if self._batch is None or self._batch.request_ids != wanted:
            rows = torch.tensor([self._rows.get(one, _SCRATCH) for one in wanted])
            penalties = torch.tensor([[self._penalties.get(one, 1.0)] for one in wanted])
            self._batch = _Batch(wanted, self._on_device(rows), self._on_device(penalties))
        return self._batch.rows, self._batch.penalties

    def _on_device(self, values: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return values
        return values.pin_memory().to(self._device, non_blocking=True)


def penalised(logits: torch.Tensor, is_seen: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    """Logits `[B, V]` in float32, those of seen tokens made less likely by `penalties` `[B, 1]`."""
    logits = logits.float()
    scale = torch.where(is_seen, penalties, 1.0)
    return torch.where(logits > 0, logits / scale, logits * scale)
