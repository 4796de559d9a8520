"""The code predictor's forward over its kernels: the same sums as `CodePredictor.forward`'s."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from vllm_omni.model_executor.models.qwen3_omni import code_predictor_kernels as kernels

if TYPE_CHECKING:
    from vllm_omni.model_executor.models.qwen3_omni.code_predictor import CodePredictor

MAX_ROWS: Final = 4
"""The most requests for which one pass over the weights is all that takes time."""

BLOCK_WEIGHTS: Final = 8192
NUM_WARPS: Final = 4


class FusedCodePredictor:
    """Reads the weights where the module has them, so that they may be loaded anew."""

    def __init__(self, predictor: CodePredictor) -> None:
        self._predictor = predictor
        attention = predictor.model.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._num_kv_heads: int = attention.num_kv_heads
        self._num_queries: int = attention.num_heads // attention.num_kv_heads
        self._cos, self._sin = predictor.model.cos, predictor.model.sin

    def __repr__(self) -> str:
        return f"<FusedCodePredictor layers={len(self._predictor.model.layers)}>"

    @staticmethod
    def knows(predictor: CodePredictor) -> bool:
        """Whether the kernels are for a predictor of this shape."""
        attention = predictor.model.layers[0].self_attn
        head_dim = attention.head_dim
        return attention.qkv_proj.bias is None and head_dim == _power(head_dim)

    def is_quicker(self, num_rows: int) -> bool:
        """Whether it is for a batch of this size."""
        return num_rows <= MAX_ROWS

    def __call__(
        self, hidden: Tensor, first_embed: Tensor, noise: Tensor, is_greedy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `CodePredictor.forward`."""
        predictor = self._predictor
        num_groups, num_layers = predictor.num_groups, len(predictor.model.layers)
        num_rows, width = hidden.shape
        kv = hidden.new_empty(
            num_layers, 2, num_rows, self._num_kv_heads, num_groups, self._head_dim
        )
        codes = torch.empty(num_rows, num_groups - 1, dtype=torch.int64, device=hidden.device)
        total = torch.zeros(num_rows, width, dtype=torch.float32, device=hidden.device)
        self._read(hidden.clone(), kv, 0)
        x = first_embed.clone()
        for group in range(num_groups - 1):
            self._read(x, kv, group + 1)
            self._choose(x, group, noise, is_greedy, codes, total)
        return codes, total

    def _read(self, x: Tensor, kv: Tensor, position: int) -> None:
        """The layers of one position; `x` `[B, width]` is what it reads, then what it makes."""
        num_rows = x.shape[0]
        heads = self._num_kv_heads * self._head_dim
        qkv = x.new_empty(num_rows, (self._num_queries + 2) * heads)
        attended = x.new_empty(num_rows, self._num_queries * heads)
        for layer, layer_kv in zip(self._predictor.model.layers, kv, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            _normed(kernels.normed_linear, x, layer.input_layernorm, attention.qkv_proj.weight, qkv)
            kernels.attend[(num_rows, self._num_kv_heads)](
                qkv,
                attention.q_norm.weight,
                attention.k_norm.weight,
                self._cos[position],
                self._sin[position],
                layer_kv,
                attended,
                num_rows,
                attention.q_norm.variance_epsilon,
                position,
                NUM_KV_HEADS=self._num_kv_heads,
                NUM_QUERIES=self._num_queries,
                BLOCK_G=_power(self._num_queries),
                D=self._head_dim,
                NUM_POSITIONS=self._predictor.num_groups,
                BLOCK_P=_power(self._predictor.num_groups),
                num_warps=1,
            )
            _add(attended, attention.o_proj.weight, x)
            gated = x.new_empty(num_rows, mlp.down_proj.weight.shape[1])
            _normed(
                kernels.normed_gated_linear,
                x,
                layer.post_attention_layernorm,
                mlp.gate_up_proj.weight,
                gated,
            )
            _add(gated, mlp.down_proj.weight, x)

    def _choose(
        self,
        x: Tensor,
        group: int,
        noise: Tensor,
        is_greedy: Tensor,
        codes: Tensor,
        total: Tensor,
    ) -> None:
        """One group's codes; their embeddings go to `x`, and into `total`."""
        predictor, sampler = self._predictor, self._predictor.sampler
        head, embedding = predictor.lm_head[group], predictor.model.codec_embedding[group]
        num_rows, vocab_size = x.shape[0], head.weight.shape[0]
        logits = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=x.device)
        _normed(kernels.normed_linear, x, predictor.model.norm, head.weight, logits)
        kernels.choose[(num_rows,)](
            logits,
            noise[:, group],
            noise.stride(0),
            is_greedy,
            embedding.weight,
            codes[:, group],
            codes.stride(0),
            x,
            total,
            sampler.temperature,
            sampler.top_p,
            V=vocab_size,
            BLOCK_V=_power(vocab_size),
            TOP_K=sampler.top_k,
            BLOCK_K=_power(sampler.top_k),
            WIDTH=x.shape[1],
            BLOCK_W=_power(x.shape[1]),
            num_warps=4,
        )


def _normed(kernel: Any, x: Tensor, norm: Any, weight: Tensor, y: Tensor) -> None:
    """A product of normed rows; `y` says how many outputs there are."""
    shape, num_programs = _shape(x, y.shape[1])
    kernel[(num_programs,)](x, norm.weight, weight, y, y.shape[1], norm.variance_epsilon, **shape)


def _add(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """Add a product to `y`."""
    shape, num_programs = _shape(x, y.shape[1])
    kernels.added_linear[(num_programs,)](x, weight, y, y.shape[1], **shape)


def _shape(x: Tensor, num_outputs: int) -> tuple[dict[str, int], int]:
    """Constants of a product, and its number of programs: together they keep every processor busy,
    and none has more weights than its registers hold."""
    num_rows, num_inputs = x.shape
    block_k = _power(num_inputs)
    block_n = max(1, BLOCK_WEIGHTS // block_k)
    shape = {
        "B": num_rows,
        "K": num_inputs,
        "BLOCK_K": block_k,
        "BLOCK_N": block_n,
        "num_warps": NUM_WARPS,
    }
    return shape, -(-num_outputs // block_n)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
