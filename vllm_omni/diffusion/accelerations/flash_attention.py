"""FlashAttention 3, as vLLM ships it, under the name that diffusers' dispatcher has for it.

Attention does not depend on the order of keys: those that a mask leaves out are moved behind the
others, and the kernel gets the number of the others. So texts of different lengths share a forward
at the price of a copy of keys and values, where a mask would take a slower kernel.

B rows, T queries, S keys, H heads of D channels.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Final

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

logger = logging.getLogger(__name__)

NAME: Final = AttentionBackendName._FLASH_3
MAX_HEAD_SIZE: Final = 256


def is_usable(device: str) -> bool:
    """Whether the kernel runs there: it is built for Hopper, and not in vLLM for CPUs."""
    if not device.startswith("cuda"):
        return False
    try:
        from vllm.vllm_flash_attn import is_fa_version_supported
    except ImportError:
        return False
    return bool(is_fa_version_supported(3))


def use_in(denoiser: torch.nn.Module) -> int:
    """Have every attention of the denoiser that asks the dispatcher take the kernel; how many.

    Not by `set_attention_backend`, which looks for another package and changes the default of all
    models of the process.
    """
    _AttentionBackendRegistry.register(NAME)(attention)
    processors = _dispatching(denoiser)
    for processor in processors:
        processor._attention_backend = NAME
    return len(processors)


def is_used_in(denoiser: torch.nn.Module) -> bool:
    """Whether the denoiser's attention takes the kernel, so that a mask of keys costs little."""
    return any(processor._attention_backend == NAME for processor in _dispatching(denoiser))


def _dispatching(denoiser: torch.nn.Module) -> list[Any]:
    """What computes attention in the denoiser by way of the dispatcher."""
    processors = (getattr(module, "processor", None) for module in denoiser.modules())
    return [one for one in processors if hasattr(one, "_attention_backend")]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """[B, T, H, D] of queries and [B, S, H, D] of keys and values to [B, T, H, D].

    `attn_mask`: None, or booleans [B, S] or [B, 1, 1, S], True for keys that count. What the kernel
    does not do (masks by query or added ones, other types and head sizes) takes torch's.
    """
    mask = _key_mask(attn_mask)
    fits = (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= MAX_HEAD_SIZE
        and (attn_mask is None or mask is not None)
        and not is_causal
    )
    if not fits:
        return _native(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if mask is None:
        return flash(query, key, value, None, scale)
    order, lengths = counted_first(mask)
    rows = torch.arange(key.shape[0], device=key.device)[:, None]
    return flash(query, key[rows, order], value[rows, order], lengths, scale)


@torch.library.custom_op("vllm_omni::counted_first", mutates_args=())
def counted_first(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S] booleans to the order [B, S] that puts the True ones first, each kind as it stood, and
    how many those are [B], int32.

    An operation of its own: sums along a row of changing length are more than the compiler takes.
    """
    counted = mask.cumsum(1)
    lengths = counted[:, -1:]
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(counted)
    place = torch.where(mask, counted - 1, lengths + positions - counted)
    order = torch.empty_like(place).scatter_(1, place, positions)
    return order, lengths[:, 0].to(torch.int32)


@counted_first.register_fake
def _(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.empty(mask.shape, dtype=torch.int64, device=mask.device)
    return order, torch.empty(mask.shape[:1], dtype=torch.int32, device=mask.device)


@torch.library.custom_op("vllm_omni::flash_attention_3", mutates_args=())
def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """The kernel; `lengths` [B] int32: keys of each row that count, the first ones."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    num_rows, num_queries, num_heads, head_size = query.shape
    num_keys = key.shape[1]
    packed = lengths is None
    result: torch.Tensor = flash_attn_varlen_func(
        query.reshape(-1, num_heads, head_size),
        key.reshape(-1, *key.shape[2:]) if packed else key,
        value.reshape(-1, *value.shape[2:]) if packed else value,
        max_seqlen_q=num_queries,
        cu_seqlens_q=_starts(num_rows, num_queries, query.device),
        max_seqlen_k=num_keys,
        cu_seqlens_k=_starts(num_rows, num_keys, key.device) if packed else None,
        seqused_k=lengths,
        softmax_scale=scale,
        fa_version=3,
    )
    return result.view(query.shape)


@flash.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=64)
def _starts(num_rows: int, length: int, device: torch.device) -> torch.Tensor:
    """Where each row begins, and the end: int32 [B + 1]."""
    return torch.arange(num_rows + 1, dtype=torch.int32, device=device) * length


def _key_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """As [B, S], where it leaves out the same keys for all queries and heads."""
    if mask is None or mask.dtype != torch.bool:
        return None
    if mask.ndim == 2:
        return mask
    return mask[:, 0, 0] if mask.ndim == 4 and mask.shape[1:3] == (1, 1) else None


def _native(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    function: Any = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
    result: torch.Tensor = function(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return result
