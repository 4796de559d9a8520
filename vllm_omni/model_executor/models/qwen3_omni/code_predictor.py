"""The code predictor: from a frame's first code to the others, one after the other, for a batch.

A transformer of few layers that reads the talker's hidden state, the frame's first code and then
its own codes, one position each. What it costs is its number of kernels: so it is written in plain
operations that a compiler joins, on tensors of fixed sizes, and draws and allocates nothing that a
graph could not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeRMSNorm,
    Qwen3OmniMoeRotaryEmbedding,
    apply_rotary_pos_emb,
)
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from vllm_omni.model_executor.models.common.code_sampling import CodeSampler

if TYPE_CHECKING:
    from vllm_omni.model_executor.models.qwen3_omni.fused_code_predictor import FusedCodePredictor

# B requests, H heads of keys and values, G heads of queries for each, K positions, D width.


class _Place(NamedTuple):
    """What depends on the position that is read, and on nothing else."""

    cos: Tensor
    sin: Tensor
    is_past: Tensor
    """`[K]`: the positions before it."""


class _Attention(nn.Module):
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
        self.q_norm = Qwen3OmniMoeRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3OmniMoeRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, x_BD: Tensor, past: Tensor, place: _Place) -> tuple[Tensor, Tensor]:
        """The output, and the keys and values of this position: `[2, B, H, D]`."""
        qkv, _ = self.qkv_proj(x_BD)
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = apply_rotary_pos_emb(
            self.q_norm(q), self.k_norm(k), place.cos, place.sin, unsqueeze_dim=0
        )
        # One query and sixteen keys: sums of products, which join with what is around them.
        q_BHGD = q.unflatten(1, (self.num_kv_heads, -1)).float() * self.head_dim**-0.5
        scores_BHGK = (q_BHGD.unsqueeze(3) * past[0].unsqueeze(2)).sum(-1)
        scores_BHGK = scores_BHGK.masked_fill(~place.is_past, float("-inf"))
        own_BHG1 = (q_BHGD * k.unsqueeze(2)).sum(-1, keepdim=True)
        weights = torch.cat([scores_BHGK, own_BHG1], dim=-1).softmax(-1)
        out_BHGD = (weights[..., :-1].unsqueeze(-1) * past[1].unsqueeze(2)).sum(-2)
        out_BHGD = out_BHGD + weights[..., -1:] * v.unsqueeze(2)
        out, _ = self.o_proj(out_BHGD.flatten(1).to(x_BD.dtype))
        return out, torch.stack([k, v])


class _MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            width, [inner] * 2, bias=False, disable_tp=True
        )
        self.down_proj = RowParallelLinear(inner, width, bias=False, disable_tp=True)

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        gate, up = gate_up.chunk(2, dim=-1)
        out, _ = self.down_proj(functional.silu(gate) * up)
        return out


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = Qwen3OmniMoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3OmniMoeRMSNorm(
            config.hidden_size, eps=config.rms_norm_eps
        )

    def forward(self, x: Tensor, past: Tensor, place: _Place) -> tuple[Tensor, Tensor]:
        attended, new = self.self_attn(self.input_layernorm(x), past, place)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), new


class _Layers(nn.Module):
    """Everything but the heads, under the names of the checkpoint."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3OmniMoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.codec_embedding = nn.ModuleList(
            nn.Embedding(config.vocab_size, config.hidden_size)
            for _ in range(config.num_code_groups - 1)
        )
        positions = torch.arange(config.num_code_groups)
        rotary = Qwen3OmniMoeRotaryEmbedding(config)
        cos, sin = rotary(self.norm.weight, positions.unsqueeze(0))
        self.register_buffer("cos", cos[0], persistent=False)
        self.register_buffer("sin", sin[0], persistent=False)
        is_past = positions.unsqueeze(0) < positions.unsqueeze(1)
        self.register_buffer("is_past", is_past, persistent=False)

    def place(self, position: int) -> _Place:
        return _Place(self.cos[position], self.sin[position], self.is_past[position])

    def forward(self, x_BD: Tensor, kv: Tensor, place: _Place) -> tuple[Tensor, Tensor]:
        """One position: its hidden state, and its keys and values `[layers, 2, B, H, D]`."""
        news = []
        for i, layer in enumerate(self.layers):
            x_BD, new = layer(x_BD, kv[i], place)
            news.append(new)
        return self.norm(x_BD), torch.stack(news)


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
        self.sampler = sampler
        self._read_one: Callable[..., tuple[Tensor, Tensor]] = self.model.forward
        self._choose_one: Callable[..., tuple[Tensor, Tensor]] = self._choose
        self._fused: FusedCodePredictor | None = None

    def join_kernels(self) -> None:
        """On a GPU: compile what is done for each position, and take kernels of our own for a few
        requests; the next calls take the time."""
        from vllm_omni.model_executor.models.qwen3_omni.fused_code_predictor import (
            FusedCodePredictor,
        )

        self._read_one = torch.compile(self.model.forward, fullgraph=True)
        self._choose_one = torch.compile(self._choose, fullgraph=True)
        if FusedCodePredictor.knows(self):
            self._fused = FusedCodePredictor(self)

    def forward(
        self, hidden: Tensor, first_embed: Tensor, noise: Tensor, is_greedy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The codes after the first `[B, groups - 1]` and the sum of their embeddings in float32.

        Args:
            hidden: what the first code was sampled from, `[B, width]`.
            first_embed: the first code's embedding, `[B, width]`.
            noise: `CodeSampler.noise` of `groups - 1` draws.
        """
        if self._fused is not None and self._fused.is_quicker(hidden.shape[0]):
            return self._fused(hidden, first_embed, noise, is_greedy)
        kv = hidden.new_zeros(len(self.model.layers), 2, hidden.shape[0], *self._kv_shape)
        self._read(hidden, kv, 0)
        codes, total = [], torch.zeros_like(first_embed, dtype=torch.float32)
        embed = first_embed
        for group in range(self.num_groups - 1):
            state = self._read(embed, kv, group + 1)
            head, embedding = self.lm_head[group], self.model.codec_embedding[group]
            code, embed = self._choose_one(
                state, head.weight, embedding.weight, noise[:, group], is_greedy
            )
            codes.append(code)
            total = total + embed
        return torch.stack(codes, dim=1), total

    def _read(self, x_BD: Tensor, kv: Tensor, position: int) -> Tensor:
        state, new = self._read_one(x_BD, kv, self.model.place(position))
        kv[:, :, :, :, position] = new
        return state

    def _choose(
        self, state: Tensor, head: Tensor, embedding: Tensor, noise: Tensor, is_greedy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One group's code and its embedding."""
        code = self.sampler.choose(functional.linear(state, head), noise, is_greedy)
        return code, functional.embedding(code, embedding)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
