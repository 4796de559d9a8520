"""The autoregressive part of GLM-Image as a vLLM model: a text in, image tokens out.

Its layers are those of GLM-4, with rotary positions in three dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.glm4 import Glm4DecoderLayer
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_omni.diffusion.models.glm_image.grids import Grids
from vllm_omni.diffusion.models.glm_image.image_positions import (
    fits,
    packed_delta,
    unpacked,
)


class GlmImageLayer(Glm4DecoderLayer):
    """GLM-4's layer; the halves of a head are rotated, not its pairs."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        self.self_attn.rotary_emb = get_rope(
            self.self_attn.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            is_neox_style=True,
        )


class TokenWriter(nn.Module, SupportsMRoPE):
    """Writes the tokens of a small and then of a large picture."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.language_model.": "model.",
            "model.visual.": None,
            "model.vqmodel.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.model_config = vllm_config.model_config
        text_config = self.config.text_config
        # GLM-4 rotates half of a head where the config does not say how much.
        text_config.rope_parameters.setdefault("partial_rotary_factor", 1.0)
        self.model = LlamaModel(
            vllm_config=vllm_config.with_hf_config(text_config),
            prefix=maybe_prefix(prefix, "model"),
            layer_type=GlmImageLayer,
        )
        self.lm_head = ParallelLMHead(
            text_config.vision_vocab_size,
            text_config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(text_config.vision_vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of text and image tokens."""
        return self.model.embed_input_ids(input_ids)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int | np.int64]:
        """A prompt counts in all three dimensions; what is written has places in two pictures, or
        counts on where the prompt asks for none."""
        tokenizer = cached_tokenizer_from_config(self.model_config)
        grids = Grids.of_text(tokenizer.decode(input_tokens, skip_special_tokens=False))
        positions = torch.arange(len(input_tokens)).expand(3, -1)
        if grids is None or not fits(grids, len(input_tokens)):
            return positions, 0
        # Of 64 bits, or vLLM's sum with its count of 32 would overflow.
        return positions, np.int64(packed_delta(grids, len(input_tokens)))

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states of a batch of flattened requests."""
        return self.model(input_ids, unpacked(positions), intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Of the whole vocabulary, since vLLM counts with it; only image tokens and the end can
        be written."""
        logits = self.logits_processor(self.lm_head, hidden_states)
        if logits is None:
            return None
        num_codes = self.config.vq_config.num_embeddings
        end = self.config.image_end_token_id
        full = logits.new_full((logits.shape[0], self.config.text_config.vocab_size), -torch.inf)
        full[:, :num_codes] = logits[:, :num_codes]
        full[:, end] = logits[:, end]
        return full

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Those of the text model; pictures are not read here."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
