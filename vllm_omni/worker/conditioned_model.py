"""What a conditioned stage's model is to our runner, beside a model of vLLM's.

Every method is called on the worker's device, under inference mode, never inside a captured graph
of vLLM's. Tensors of one row per request are in the order of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_omni.core.conditioning import Rows


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """One step's sampled tokens, for what the model does after sampling. B requests."""

    hidden: torch.Tensor
    """`[B, hidden]`: what the tokens were sampled from."""
    token_ids: torch.Tensor
    """`[B]`"""
    is_greedy: tuple[bool, ...]
    """By request; sampling of further codes follows the request's own."""
    generators: tuple[torch.Generator | None, ...]
    """By request; None for one without a seed."""


class ConditionedModel(Protocol):
    """See the module."""

    row_width: int
    """Width of `rows`; that of `inputs` is the model's hidden size."""

    def rows(self, rows: Rows) -> torch.Tensor:
        """A bridge's rows as `[positions, row_width]`."""

    def rest_row(self) -> torch.Tensor:
        """The condition of every position after the last that the bridge gave: `[row_width]`."""

    def inputs(self, base: torch.Tensor, conditions: torch.Tensor) -> torch.Tensor:
        """Inputs of positions, from their base and their conditions."""

    def warm_up(self, max_batch: int) -> None:
        """Record graphs of `after_sampling` for batches up to a size, where the engine's own
        forward has graphs too."""

    def after_sampling(self, batch: SampledBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes `[B, groups]` (integers) for the vocoder, and the base `[B, row_width]` of the
        position that each sampled token will stand at."""
