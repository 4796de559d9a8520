"""The inputs of a conditioned stage: rows by position for every request, and the codes it makes.

Plain functions of (requests, positions, counts): knows nothing of vLLM's runner but what it is
handed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from vllm_omni.core.conditioning import Conditioning, Rows
from vllm_omni.worker.conditioned_model import ConditionedModel
from vllm_omni.worker.row_pool import (
    REST_ROW,
    SCRATCH_ROW,
    Indices,
    RowPool,
    RowSequence,
)

_FIRST_PAGES: Final = 64

_Arrived: TypeAlias = "defaultdict[str, list[tuple[np.ndarray[Any, Any], Indices]]]"
"""By kind of rows: their data, and where they are to lie."""


@dataclass(slots=True)
class _Conditioned:
    base: RowSequence = field(default_factory=RowSequence)
    conditions: RowSequence = field(default_factory=RowSequence)
    positions: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's part of a step."""

    request_id: str
    first: int
    """Position of its first token in this step."""
    count: int


class ConditionedInputs:
    """Lives in the worker. Requests it never heard of keep the inputs that vLLM gave them."""

    def __init__(self, model: ConditionedModel, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        self._pool = RowPool(model.row_width, dtype, device, _FIRST_PAGES)
        self._requests: dict[str, _Conditioned] = {}
        self.take_weights()

    def __repr__(self) -> str:
        return f"<ConditionedInputs requests={len(self._requests)} {self._pool!r}>"

    def take_weights(self) -> None:
        """Compute what depends on the model's weights alone, when they are new."""
        rest = self._model.rest_row()
        self._pool.rows[REST_ROW] = rest.to(self._pool.rows.dtype)

    def update(self, updates: Iterable[tuple[str, Conditioning]]) -> None:
        """Take what the bridges made: one call of the model for each kind of rows, whatever the
        number of requests."""
        arrived: _Arrived = defaultdict(list)
        for request_id, update in updates:
            if (prompt := update.prompt) is not None:
                request = self._requests[request_id] = _Conditioned(positions=prompt.positions)
                self._reserve(request.base, prompt.base, arrived)
                self._reserve(request.conditions, prompt.conditions, arrived)
            self._reserve(self._requests[request_id].conditions, update.steps, arrived)
        for kind, parts in arrived.items():
            rows = Rows(kind, np.concatenate([data for data, _ in parts]))
            self._pool.write(np.concatenate([at for _, at in parts]), self._model.rows(rows))

    def _reserve(self, sequence: RowSequence, parts: Sequence[Rows], arrived: _Arrived) -> None:
        """Give rows that have arrived their places, in order."""
        for part in parts:
            if len(part):
                arrived[part.kind].append((part.data, self._pool.extend(sequence, len(part))))

    def finish(self, request_ids: Iterable[str]) -> None:
        """Drop requests that are over."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._pool.release(request.base)
                self._pool.release(request.conditions)

    def positions(self, request_id: str) -> np.ndarray | None:
        """Rotary positions of a request's prompt, where they are not just its numbers."""
        request = self._requests.get(request_id)
        return request.positions if request is not None else None

    def has_all(self, batch: Sequence[Scheduled]) -> bool:
        """Whether every row of a step is filled here."""
        return all(part.request_id in self._requests for part in batch)

    def disclaim(self, is_token_id: np.ndarray, batch: Sequence[Scheduled]) -> None:
        """Say of the step's rows that are filled here that they are no token ids."""
        row = 0
        for part in batch:
            if part.request_id in self._requests:
                is_token_id[row : row + part.count] = False
            row += part.count

    def fill(self, inputs: torch.Tensor, batch: Sequence[Scheduled]) -> None:
        """Write the step's inputs, in place: the buffer is the one that graphs read."""
        num_rows = sum(part.count for part in batch)
        places = np.empty((2, num_rows), dtype=np.int64)
        base, conditions = places
        targets: list[Indices] = []
        row = filled = 0
        for part in batch:
            request = self._requests.get(part.request_id)
            if request is not None:
                end = filled + part.count
                self._locate(request, part, base[filled:end], conditions[filled:end])
                targets.append(np.arange(row, row + part.count))
                filled = end
            row += part.count
        if not filled:
            return
        rows = self._pool.read(places[:, :filled].reshape(-1))
        made = self._model.inputs(rows[:filled], rows[filled:]).to(inputs.dtype)
        if filled == num_rows:
            inputs[:num_rows] = made
        else:
            index = torch.from_numpy(np.concatenate(targets)).to(inputs.device, non_blocking=True)
            inputs.index_copy_(0, index, made)

    def _locate(
        self, request: _Conditioned, part: Scheduled, base: Indices, conditions: Indices
    ) -> None:
        """Write where the rows of a request's part of the step lie."""
        first, count = part.first, part.count
        known = min(max(request.conditions.length - first, 0), count)
        if count == 1:  # nearly always: a step of decoding
            base[0] = self._pool.index(request.base, first)
            conditions[0] = self._pool.index(request.conditions, first) if known else REST_ROW
            return
        base[:] = self._pool.indices(request.base, first, count)
        conditions[known:] = REST_ROW
        if known:
            conditions[:known] = self._pool.indices(request.conditions, first, known)

    def keep(self, base: torch.Tensor, positions: Sequence[tuple[str, int] | None]) -> None:
        """Keep the base rows of the positions that were sampled for; None: nothing was."""
        indices = np.full(len(positions), SCRATCH_ROW, dtype=np.int64)
        for row, sampled in enumerate(positions):
            if sampled is None:
                continue
            request_id, position = sampled
            request = self._requests.get(request_id)
            if request is not None:
                self._pool.reserve(request.base, position + 1)
                indices[row] = self._pool.index(request.base, position)
        self._pool.write(indices, base)
