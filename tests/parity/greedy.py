"""Greedy choices of a reference, and whether somebody else's are the same.

Two implementations add the same numbers in another order. Where the two best of 150,000 logits are
closer to each other than that moves them, either is right, and what follows is another text: a
comparison ends there. A wrong implementation differs somewhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

TIE: Final = 1e-3
"""Of the spread of all logits of a choice: those this near to the best are as good."""


@dataclass(frozen=True)
class Chosen:
    """A sequence of choices, each with all that were as good."""

    tokens: list[int]
    ties: list[set[int]]

    @classmethod
    def of(cls, tokens: Sequence[int], logits: Sequence[torch.Tensor]) -> Chosen:
        """`logits`: one vector for each token."""
        return cls(list(tokens), [_best(row) for row in logits])

    def first(self, num: int) -> Chosen:
        """The first ones of them."""
        return Chosen(self.tokens[:num], self.ties[:num])

    def difference(self, others: Sequence[int]) -> str:
        """Where `others` choose what is not as good; empty when they are right to the end."""
        for i, (token, other) in enumerate(zip(self.tokens, others, strict=False)):
            if token != other:
                if other in self.ties[i]:
                    return ""
                return f"{other} instead of {token} at {i} of {len(self.tokens)}"
        if len(others) < len(self.tokens):
            return f"{len(others)} instead of {len(self.tokens)}"
        return ""


def _best(logits: torch.Tensor) -> set[int]:
    spread = logits[logits.isfinite()].std()
    found: list[int] = (logits >= logits.max() - TIE * spread).nonzero().flatten().tolist()
    return set(found)
