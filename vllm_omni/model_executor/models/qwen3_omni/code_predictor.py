"""The code predictor: from a frame's first code to the others, one after the other, for a batch.

A transformer of few layers that reads [the talker's hidden state, the frame's first code] and then
its own codes, at most as many positions as there are groups. Its modules are transformers' own;
the loop keeps keys and values in buffers of a fixed size, so that a graph can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration,
    apply_rotary_pos_emb,
)

from vllm_omni.model_executor.models.common.code_sampling import CodeSampler


class CodePredictor(nn.Module):
    """See the module. B requests, P positions, N heads, H head width."""

    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig, sampler: CodeSampler) -> None:
        super().__init__()
        theirs = Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration._from_config(config)
        self.model, self.lm_head = theirs.model, theirs.lm_head
        self.num_groups = config.num_code_groups
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = self.model.layers[0].self_attn.head_dim
        self.sampler = sampler

    def forward(
        self,
        hidden: torch.Tensor,
        first_embed: torch.Tensor,
        is_greedy: Sequence[bool],
        generators: Sequence[torch.Generator | None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes after the first `[B, groups - 1]` and the sum of their embeddings.

        Args:
            hidden: what the first code was sampled from, `[B, width]`.
            first_embed: the first code's embedding, `[B, width]`.
        """
        num_positions = self.num_groups
        cos, sin = self._rotations(hidden, num_positions)
        cache = [
            hidden.new_zeros(2, hidden.shape[0], self.num_kv_heads, num_positions, self.head_dim)
            for _ in self.model.layers
        ]
        inputs = torch.stack([hidden, first_embed], dim=1)
        codes, total, end = [], torch.zeros_like(first_embed), 2
        for group in range(self.num_groups - 1):
            begin = end - inputs.shape[1]
            output = self._layers(inputs, cos[:, begin:end], sin[:, begin:end], cache, begin)
            logits = self.lm_head[group](output[:, -1])
            code = self.sampler(logits.float(), is_greedy, generators)
            embed = self.model.codec_embedding[group](code)
            codes.append(code)
            total = total + embed
            inputs, end = embed.unsqueeze(1), end + 1
        return torch.stack(codes, dim=1), total

    def _rotations(self, like: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(num, device=like.device).unsqueeze(0)
        cos, sin = self.model.rotary_emb(like.unsqueeze(1), positions)
        return cos, sin

    def _layers(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: Sequence[torch.Tensor],
        begin: int,
    ) -> torch.Tensor:
        for layer, kv in zip(self.model.layers, cache, strict=True):
            attended = self._attend(
                layer.self_attn, layer.input_layernorm(x), (cos, sin), kv, begin
            )
            x = x + attended
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed: torch.Tensor = self.model.norm(x)
        return normed

    def _attend(
        self,
        attention: nn.Module,
        x: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        kv: torch.Tensor,
        begin: int,
    ) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q_BNPH = attention.q_norm(attention.q_proj(x).view(shape)).transpose(1, 2)
        k_BNPH = attention.k_norm(attention.k_proj(x).view(shape)).transpose(1, 2)
        v_BNPH = attention.v_proj(x).view(shape).transpose(1, 2)
        q_BNPH, k_BNPH = apply_rotary_pos_emb(q_BNPH, k_BNPH, *rotations)
        end = begin + x.shape[1]
        kv[0, :, :, begin:end], kv[1, :, :, begin:end] = k_BNPH, v_BNPH
        out_BNPH = functional.scaled_dot_product_attention(
            q_BNPH,
            kv[0, :, :, :end],
            kv[1, :, :, :end],
            is_causal=begin == 0,
            scale=attention.scaling,
            enable_gqa=True,
        )
        result: torch.Tensor = attention.o_proj(out_BNPH.transpose(1, 2).flatten(-2))
        return result
