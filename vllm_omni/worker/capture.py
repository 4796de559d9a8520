"""Rows of a stage's forward, kept beside its KV cache for the stages that it conditions.

One row per slot of the KV cache and captured layer: a token that is not computed because its block
is cached still has its row, one that is computed again writes the same row again, and a prompt that
came in chunks is read as a whole. Writing is one indexed copy per layer on the device, without a
look from the host; only what is sent is copied to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_omni.config.pipeline import LAST_HIDDEN, CaptureScope
from vllm_omni.core.conditioning import KIND_ROWS
from vllm_omni.core.payloads import StepPayload, as_array

Spans = list[list[int]]
"""`[[first position, count], ...]`, ascending."""


@dataclass(frozen=True, slots=True)
class Captured:
    """Rows of one layer on their way to the host."""

    layer: int
    """Index in `Capture.layers`."""
    spans: Spans
    rows: torch.Tensor

    def payload(self) -> StepPayload:
        """As a frame, once `rows` is complete on the host."""
        data, dtype = as_array(self.rows)
        meta = {
            "kind": KIND_ROWS,
            "layer": self.layer,
            "spans": self.spans,
            "dtype": dtype,
            "width": self.rows.shape[1],
        }
        return StepPayload(meta, data)


class StateCapture:
    """The side buffers of one worker."""

    def __init__(self, layers: Sequence[int], scope: CaptureScope) -> None:
        self.layers = tuple(layers)
        self.scope = scope
        self._buffers: list[torch.Tensor] = []
        self.block_size = 0

    def __repr__(self) -> str:
        return f"<StateCapture layers={self.layers} {self.scope}>"

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The layers that the model has to return beside its result, ascending."""
        return tuple(sorted(layer for layer in self.layers if layer != LAST_HIDDEN))

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """What the buffers take for each slot of the KV cache."""
        return len(self.layers) * width * dtype.itemsize

    def share_of_kv(
        self, available_bytes: int, specs: Iterable[Any], width: int, dtype: torch.dtype
    ) -> int:
        """What of this memory the KV cache may take, so that the rows fit beside it.

        Args:
            specs: vLLM's `KVCacheSpec`s of all layers.
        """
        per_slot = sum(spec.page_size_bytes / spec.block_size for spec in specs)
        return int(available_bytes * per_slot / (per_slot + self.row_bytes(width, dtype)))

    def allocate(
        self, num_blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make the buffers, when the KV cache is made."""
        self.block_size = block_size
        self._buffers = [
            torch.zeros(num_blocks * block_size, width, dtype=dtype, device=device)
            for _ in self.layers
        ]

    def keep(
        self, hidden: torch.Tensor, aux: Sequence[torch.Tensor] | None, slots: torch.Tensor
    ) -> None:
        """Keep the rows of a step. `slots` has one entry for each token of the step."""
        num_tokens = slots.shape[0]
        by_layer = dict(zip(self.aux_layers, aux or (), strict=True))
        by_layer[LAST_HIDDEN] = hidden
        for buffer, layer in zip(self._buffers, self.layers, strict=True):
            buffer.index_copy_(0, slots.long(), by_layer[layer][:num_tokens].to(buffer.dtype))

    def slots(self, block_ids: Sequence[int], spans: Spans) -> npt.NDArray[np.int64]:
        """Where a request's rows lie, from the blocks of its KV cache."""
        positions = positions_of(spans)
        blocks = np.asarray(block_ids, dtype=np.int64)
        found: npt.NDArray[np.int64] = blocks[positions // self.block_size] * self.block_size
        return found + positions % self.block_size

    def read(self, slots: torch.Tensor, spans: Sequence[Spans]) -> list[list[Captured]]:
        """Start to copy rows of several requests to the host: one copy for each layer.

        Args:
            slots: those of the first request by position, then those of the next, on the device.
            spans: which positions of each request they are.
        """
        found: list[list[Captured]] = [[] for _ in spans]
        if not slots.numel():
            return found
        lengths = [sum(count for _, count in of_one) for of_one in spans]
        for layer, buffer in enumerate(self._buffers):
            rows = buffer.index_select(0, slots).to("cpu", non_blocking=True)
            for captured, of_one, part in zip(found, spans, rows.split(lengths), strict=True):
                if of_one:
                    captured.append(Captured(layer, of_one, part))
        return found


def positions_of(spans: Spans) -> npt.NDArray[np.int64]:
    """Spans as ascending positions."""
    parts = [np.arange(first, first + count, dtype=np.int64) for first, count in spans]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def spans_of(positions: Iterable[int]) -> Spans:
    """Ascending positions as spans."""
    spans: Spans = []
    for position in positions:
        if spans and sum(spans[-1]) == position:
            spans[-1][1] += 1
        else:
            spans.append([position, 1])
    return spans
