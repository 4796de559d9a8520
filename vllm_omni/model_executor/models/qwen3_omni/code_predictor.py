"""The code predictor: from a frame's first code to the others, one after the other, for a batch.

A transformer of few layers that reads [the talker's hidden state, the frame's first code] and then
its own codes, one position per group. Made of vLLM's fused layers, with keys and values in tensors
of a fixed size; it draws and allocates nothing that a graph could not hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from vllm_omni.model_executor.models.common.code_sampling import CodeSampler


class _Attention(nn.Module):
    """T tokens (B requests, P positions each), N heads, H head width."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            self.num_heads,
            self.num_kv_heads,
            bias=config.attention_bias,
            disable_tp=True,
        )
        self.o_proj = RowParallelLinear(
            self.num_heads * self.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            disable_tp=True,
        )
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = get_rope(
            self.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
        )

    def forward(
        self, x_TD: torch.Tensor, positions_T: torch.Tensor, kv: torch.Tensor, begin: int
    ) -> torch.Tensor:
        num_requests = kv.shape[1]
        qkv, _ = self.qkv_proj(x_TD)
        q, k, v = qkv.split(
            [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)],
            dim=-1,
        )
        q = self.q_norm(q.reshape(-1, self.num_heads, self.head_dim)).flatten(1)
        k = self.k_norm(k.reshape(-1, self.num_kv_heads, self.head_dim)).flatten(1)
        q, k = self.rotary_emb(positions_T, q, k)

        def by_head(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(num_requests, -1, rows.shape[-1] // self.head_dim, self.head_dim)

        q_BNPH = by_head(q).transpose(1, 2)
        end = begin + q_BNPH.shape[2]
        kv[0, :, :, begin:end] = by_head(k).transpose(1, 2)
        kv[1, :, :, begin:end] = by_head(v.contiguous()).transpose(1, 2)
        out_BNPH = functional.scaled_dot_product_attention(
            q_BNPH,
            kv[0, :, :, :end],
            kv[1, :, :, :end],
            is_causal=begin == 0,
            enable_gqa=True,
        )
        out, _ = self.o_proj(out_BNPH.transpose(1, 2).reshape(x_TD.shape[0], -1))
        return out


class _MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            width, [inner] * 2, bias=False, disable_tp=True
        )
        self.down_proj = RowParallelLinear(inner, width, bias=False, disable_tp=True)
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(self.act_fn(gate_up))
        return out


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        kv: torch.Tensor,
        begin: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = x
            x = self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, positions, kv, begin)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class _Layers(nn.Module):
    """Everything but the heads, under the names of the checkpoint."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.codec_embedding = nn.ModuleList(
            nn.Embedding(config.vocab_size, config.hidden_size)
            for _ in range(config.num_code_groups - 1)
        )

    def forward(self, x_BPD: torch.Tensor, kv: torch.Tensor, begin: int) -> torch.Tensor:
        """Hidden states of the last position of every request: `[B, D]`."""
        num_requests, num_positions, width = x_BPD.shape
        positions = torch.arange(begin, begin + num_positions, device=x_BPD.device)
        positions_T = positions.repeat(num_requests)
        x, residual = x_BPD.reshape(-1, width), None
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            x, residual = layer(x, residual, positions_T, layer_kv, begin)
        x, _ = self.norm(x, residual)
        last: torch.Tensor = x.view(num_requests, num_positions, width)[:, -1]
        return last


class CodePredictor(nn.Module):
    """See the module."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )

    def __init__(self, config: Any, sampler: CodeSampler) -> None:
        super().__init__()
        self.model = _Layers(config)
        self.lm_head = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            for _ in range(config.num_code_groups - 1)
        )
        self.num_groups = config.num_code_groups
        self._kv_shape = (config.num_key_value_heads, config.num_code_groups, config.head_dim)
        self._sampler = sampler

    def forward(
        self,
        hidden: torch.Tensor,
        first_embed: torch.Tensor,
        noise: torch.Tensor,
        is_greedy: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes after the first `[B, groups - 1]` and the sum of their embeddings in float32.

        Args:
            hidden: what the first code was sampled from, `[B, width]`.
            first_embed: the first code's embedding, `[B, width]`.
            noise: `CodeSampler.noise` of `groups - 1` draws.
        """
        kv = hidden.new_empty(len(self.model.layers), 2, hidden.shape[0], *self._kv_shape)
        inputs = torch.stack([hidden, first_embed], dim=1)
        codes, total, begin = [], torch.zeros_like(first_embed, dtype=torch.float32), 0
        for group in range(self.num_groups - 1):
            logits = self.lm_head[group](self.model(inputs, kv, begin))
            code = self._sampler.choose(logits, noise[:, group], is_greedy)
            embed = self.model.codec_embedding[group](code)
            codes.append(code)
            total = total + embed
            begin += inputs.shape[1]
            inputs = embed.unsqueeze(1)
        return torch.stack(codes, dim=1), total

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
