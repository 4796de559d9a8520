"""Sampling of codes beside vLLM's sampler: a batch, each request greedy or with its own seed.

All random numbers are drawn before, so that what uses them can be in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSampler:
    """Top-k, then top-p, the same for all requests."""

    top_k: int
    top_p: float
    temperature: float = 1.0

    def noise(
        self,
        num_draws: int,
        is_greedy: Sequence[bool],
        generators: Sequence[torch.Generator | None],
        device: torch.device,
    ) -> torch.Tensor:
        """Random numbers for so many draws of every request: `[B, draws, top_k]`."""
        shape = (len(is_greedy), num_draws, self.top_k)
        if all(is_greedy):
            return torch.ones(shape, device=device)
        noise = torch.empty(shape, device=device).exponential_()
        for row, generator in enumerate(generators):
            if generator is not None and not is_greedy[row]:
                noise[row].exponential_(generator=generator)
        return noise

    def choose(
        self, logits: torch.Tensor, noise: torch.Tensor, is_greedy: torch.Tensor
    ) -> torch.Tensor:
        """One code for each row of `[B, codes]`, with its `[B, top_k]` of the noise."""
        values, indices = (logits.float() / self.temperature).topk(self.top_k)
        probabilities = values.softmax(dim=-1)
        # A value stays while those before it do not reach top_p; the first always does.
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        # The largest of p / e, with e exponential, falls on each value with its probability.
        drawn = (probabilities / noise).argmax(dim=-1)
        place = drawn.masked_fill(is_greedy, 0)
        return indices.gather(-1, place.unsqueeze(-1)).squeeze(-1)
