"""Whether a stage chooses what the reference chooses, to the last token.

There is no room for ties: random weights leave the two best of all logits further apart than what
another order of float32 additions moves.
"""

from __future__ import annotations

from collections.abc import Sequence


def difference(expected: Sequence[int], found: Sequence[int]) -> str:
    """Where `found` is not as expected; empty when it is, for as long as the reference goes."""
    for i, (token, other) in enumerate(zip(expected, found, strict=False)):
        if token != other:
            return f"{other} instead of {token} at {i} of {len(expected)}"
    if len(found) < len(expected):
        return f"{len(found)} instead of {len(expected)}"
    return ""
