"""Sampling of codes beside vLLM's sampler: a batch, each request greedy or with its own seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSampler:
    """Top-k and top-p of a fixed size for all requests; greedy for those that ask for it."""

    top_k: int
    top_p: float
    temperature: float = 1.0

    def __call__(
        self,
        logits: torch.Tensor,
        is_greedy: Sequence[bool],
        generators: Sequence[torch.Generator | None],
    ) -> torch.Tensor:
        """One code for each row of `[B, codes]`."""
        best = logits.argmax(dim=-1)
        if all(is_greedy):
            return best
        values, indices = (logits / self.temperature).topk(min(self.top_k, logits.shape[-1]))
        probabilities = values.softmax(dim=-1)
        # A value stays while those before it do not reach top_p; the first always does.
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        # The largest of p / e with e exponential falls on each value with its probability.
        noise = torch.empty_like(probabilities).exponential_()
        for row, generator in enumerate(generators):
            if generator is not None and not is_greedy[row]:
                noise[row].exponential_(generator=generator)
        drawn = indices.gather(-1, (probabilities / noise).argmax(dim=-1, keepdim=True)).squeeze(-1)
        if not any(is_greedy):
            return drawn
        greedy = torch.tensor(is_greedy, device=logits.device)
        return torch.where(greedy, best, drawn)
