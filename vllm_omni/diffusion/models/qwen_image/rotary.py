"""Rotary embedding in real numbers, for the compiler: it takes no complex ones, so that each of the
reference's multiplications becomes kernels of its own between those that it makes."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers import transformer_qwenimage


def use_real_numbers(transformer: Any) -> None:
    """Have the transformer make its frequencies as cosines and sines, and rotate with those."""
    if transformer_qwenimage.apply_rotary_emb_qwen is not _rotated:
        transformer_qwenimage.apply_rotary_emb_qwen = _rotated
    transformer.pos_embed.register_forward_hook(_as_real)


def rotated(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """[B, S, H, D] of queries or keys, rotated by [S, D / 2, 2] of cosines and sines."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = frequencies.unsqueeze(1).unbind(-1)
    return (
        torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(3).type_as(x)
    )


def _as_real(
    module: torch.nn.Module, arguments: object, frequencies: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    return tuple(torch.view_as_real(one) for one in frequencies)


_REFERENCE = transformer_qwenimage.apply_rotary_emb_qwen


def _rotated(x: torch.Tensor, freqs_cis: Any, *args: Any, **kwargs: Any) -> Any:
    """What the attention calls; other transformers of the process bring complex frequencies."""
    if isinstance(freqs_cis, torch.Tensor) and not freqs_cis.is_complex():
        return rotated(x, freqs_cis)
    return _REFERENCE(x, freqs_cis, *args, **kwargs)
