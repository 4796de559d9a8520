"""Where the image tokens of GLM-Image stand, packed into the one number that vLLM counts up.

A written token belongs to a small picture of the whole or to the large one after it, and has a
row and a column there. vLLM gives the tokens that a request writes consecutive positions from a
start that the model chooses: so the start says everything else, above the bits that count.

Bits, from the lowest: 16 count, 16 prompt length, 8 and 8 columns and rows of the small picture,
7 and 7 those of the large one.
"""

from __future__ import annotations

from typing import Final

import torch

from vllm_omni.diffusion.models.glm_image.grids import MAX_SIDE, Grids

PACKED: Final = 1 << 32
"""Positions of prompts are below, packed ones are not."""
MAX_PROMPT: Final = (1 << 16) - 1


def fits(grids: Grids, prompt_length: int) -> bool:
    """Whether the bits hold them."""
    sides_fit = max(grids[:2]) <= MAX_SIDE and max(grids[2:]) < 1 << 8
    return sides_fit and prompt_length <= MAX_PROMPT


def packed_delta(grids: Grids, prompt_length: int) -> int:
    """What vLLM adds to the index of a written token to have its packed position."""
    assert fits(grids, prompt_length), "the bits hold the picture and the prompt"
    start = grids.rows << 55 | grids.columns << 48
    start |= grids.small_rows << 40 | grids.small_columns << 32
    return (start | prompt_length << 16) - prompt_length


def unpacked(positions: torch.Tensor) -> torch.Tensor:
    """Positions as vLLM counts them to time, row and column; those of prompts stay."""
    packed = positions[0]
    count, length = packed & 0xFFFF, packed >> 16 & 0xFFFF
    small_columns, small_rows = packed >> 32 & 0xFF, packed >> 40 & 0xFF
    columns, rows = packed >> 48 & 0x7F, packed >> 55 & 0x7F
    num_small = small_rows * small_columns
    in_small = count < num_small
    index = torch.where(in_small, count, count - num_small)
    across = torch.where(in_small, small_columns, columns).clamp(min=1)
    large_begins = torch.maximum(small_rows, small_columns)
    begins = length + torch.where(in_small, 0, large_begins)
    is_end = index >= torch.where(in_small, num_small, rows * columns)
    end = begins + torch.maximum(rows, columns)
    written = torch.stack([begins, begins + index // across, begins + index % across])
    written = torch.where(is_end, end, written)
    return torch.where(packed >= PACKED, written, positions)
