"""The talker as a model of vLLM's: a decoder over codes, fed with the thinker's states.

Input of a position: the embedding of the last code plus what the thinker thought of one token of
the reply, both in the thinker's width, projected together into the talker's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer, Qwen2MLP, Qwen2Model
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from vllm_omni.core.conditioning import Rows
from vllm_omni.model_executor.models.common.rows_data import tensor_of
from vllm_omni.model_executor.models.qwen2_5_omni.bridges import CODEC, NONE, STATES, TEXT
from vllm_omni.worker.conditioned_model import SampledBatch

_THINKER_EMBED = "thinker.model.embed_tokens.weight"


class TalkerLayer(Qwen2DecoderLayer):
    """vLLM's layer with heads of a width of their own."""

    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        nn.Module.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = LlamaAttention(
            config,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            quant_config=quant_config,
            bias=True,
            bias_o_proj=False,
            cache_config=cache_config,
            prefix=f"{prefix}.self_attn",
        )
        self.mlp = Qwen2MLP(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            quant_config=quant_config,
            prefix=f"{prefix}.mlp",
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Talker(nn.Module, SupportsMRoPE):
    """See the module; satisfies `ConditionedModel`."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.codec_head.": "lm_head.",
            "talker.": "",
            "thinker.": None,
            "token2wav.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.row_width: int = config.embedding_size
        self.model = Qwen2Model(
            vllm_config=vllm_config,
            prefix=maybe_prefix(prefix, "model"),
            decoder_layer_type=TalkerLayer,
        )
        self.model.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.embedding_size)
        self.thinker_to_talker_proj = nn.Linear(config.embedding_size, config.hidden_size)
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        self._known = {token: i for i, token in enumerate(self._text_tokens())}
        self.text_embed = nn.Embedding(len(self._known), config.embedding_size)

    def _text_tokens(self) -> list[int]:
        """Tokens of the thinker's vocabulary that the talker itself puts in."""
        config = self.config
        tokens = {config.tts_text_end_token_id, config.tts_text_pad_token_id}
        return sorted(tokens | set(config.speaker_id.values()))

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.thinker_to_talker_proj(self.model.embed_tokens(input_ids))
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> Any:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = self.logits_processor(self.lm_head, hidden_states)
        if logits is not None:
            logits[:, self.config.tts_codec_start_token_id] = float("-inf")
        return logits

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        """Of a prompt without media; others come with theirs."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    # What follows is asked by our runner.

    def rows(self, rows: Rows) -> torch.Tensor:
        weight = self.text_embed.weight
        if rows.kind == NONE:
            return torch.zeros(len(rows), self.row_width, device=weight.device)
        if rows.kind == TEXT:
            known = np.array([self._known[int(token)] for token in rows.data])
            return self.text_embed(tensor_of(known, weight.device))
        data = tensor_of(rows.data, weight.device)
        if rows.kind == CODEC:
            return self.model.embed_tokens(data)
        assert rows.kind == STATES, f"no rows of kind {rows.kind!r}"
        states = data.to(weight.dtype)
        return states[:, 1] + states[:, 0]

    def rest_row(self) -> torch.Tensor:
        return self.rows(Rows(TEXT, np.array([self.config.tts_text_pad_token_id])))[0]

    def inputs(self, base: torch.Tensor, conditions: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.thinker_to_talker_proj(base + conditions)
        return projected

    def after_sampling(self, batch: SampledBatch) -> tuple[torch.Tensor, torch.Tensor]:
        codes = batch.token_ids.long()
        return codes.unsqueeze(1), self.model.embed_tokens(codes)

    def warm_up(self, max_batch: int) -> None:
        """Nothing: what follows sampling is one look-up."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loader = AutoWeightsLoader(self)
        return loader.load_weights(self._own(weights), mapper=self.hf_to_vllm_mapper)

    def _own(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """The talker's weights, and of the thinker's vocabulary the few rows it needs."""
        for name, weight in weights:
            if name == _THINKER_EMBED:
                yield "talker.text_embed.weight", weight[list(self._known)]
            else:
                yield name, weight

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Parts of the checkpoint that are other stages'."""
        return not (name.startswith("talker.") or name == _THINKER_EMBED)
