"""The talker as a model of vLLM's: a mixture-of-experts decoder over codes, and what follows it.

Input of a position: the embeddings of the last frame's codes, summed, plus the projected text of
one token of the reply. The decoder samples a frame's first code, the code predictor the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerResizeMLP,
)
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_omni.core.conditioning import Rows
from vllm_omni.model_executor.models.common.code_sampling import CodeSampler
from vllm_omni.model_executor.models.common.rows_data import tensor_of
from vllm_omni.model_executor.models.qwen3_omni.bridges import CODEC, MEDIA, NONE, TEXT
from vllm_omni.model_executor.models.qwen3_omni.code_predictor import CodePredictor
from vllm_omni.platforms.graphs import BatchGraphs
from vllm_omni.worker.conditioned_model import SampledBatch

NUM_SPECIAL_CODES: Final = 1024
"""The last entries of the vocabulary; of them only the end is ever sampled."""

_USED: Final = ("talker.", "thinker.model.embed_tokens.")


@support_torch_compile(
    dynamic_arg_dims={
        "input_ids": 0,
        "positions": -1,
        "intermediate_tensors": 0,
        "inputs_embeds": 0,
    }
)
class _Decoder(Qwen3MoeModel):
    """vLLM's decoder, compiled for positions of three axes: `[3, T]`."""

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        # Not `super()`, a closure: vLLM loads what it compiled with the globals of this alone.
        return Qwen3MoeModel.forward(
            self, input_ids, positions, intermediate_tensors, inputs_embeds
        )


class Talker(nn.Module, SupportsMRoPE):
    """See the module; satisfies `ConditionedModel`."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.codec_head.": "lm_head.",
            "thinker.model.embed_tokens.": "thinker_embed.",
            "talker.": "",
            "thinker.": None,
            "code2wav.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        text = config.text_config
        self.config = config
        self.row_width: int = text.hidden_size
        self.model = _Decoder(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            text.vocab_size, text.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        self.logits_processor = LogitsProcessor(text.vocab_size)
        self.text_projection = Qwen3OmniMoeTalkerResizeMLP(config)
        self.hidden_projection = Qwen3OmniMoeTalkerResizeMLP(config)
        self.thinker_embed = nn.Embedding(config.thinker_vocab_size, config.thinker_hidden_size)
        # The reference draws the later codes so, whatever the first one's sampling is.
        self._sampler = CodeSampler(top_k=50, top_p=0.8)
        self.code_predictor = CodePredictor(config.code_predictor_config, self._sampler)
        self._make_frames = BatchGraphs(self._frames)
        self._greedy_flags: tuple[tuple[bool, ...], torch.Tensor] = (), torch.empty(0)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        suppressed = torch.zeros(text.vocab_size, dtype=torch.bool)
        suppressed[text.vocab_size - NUM_SPECIAL_CODES :] = True
        suppressed[config.codec_eos_token_id] = False
        self.register_buffer("suppressed", suppressed, persistent=False)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

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
        if logits is None:
            return None  # another rank has them
        return logits.masked_fill_(self.suppressed, float("-inf"))

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        """Of a prompt without media; others come with theirs."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    # What follows is asked by our runner.

    def rows(self, rows: Rows) -> torch.Tensor:
        device = self.suppressed.device
        if rows.kind == NONE:
            return torch.zeros(len(rows), self.row_width, device=device)
        data = tensor_of(rows.data, device)
        if rows.kind == TEXT:
            return self.text_projection(self.thinker_embed(data))
        if rows.kind == CODEC:
            return self.model.embed_input_ids(data)
        assert rows.kind == MEDIA, f"no rows of kind {rows.kind!r}"
        return self.hidden_projection(data.to(self.thinker_embed.weight.dtype))

    def rest_row(self) -> torch.Tensor:
        return self.rows(Rows(TEXT, np.array([self.config.tts_pad_token_id])))[0]

    def inputs(self, base: torch.Tensor, conditions: torch.Tensor) -> torch.Tensor:
        return base + conditions

    def after_sampling(self, batch: SampledBatch) -> tuple[torch.Tensor, torch.Tensor]:
        device = batch.token_ids.device
        num_draws = self.code_predictor.num_groups - 1
        noise = self._sampler.noise(num_draws, batch.is_greedy, batch.generators, device)
        if self._greedy_flags[0] != batch.is_greedy:
            self._greedy_flags = batch.is_greedy, tensor_of(np.array(batch.is_greedy), device)
        codes, base = self._make_frames(batch.hidden, batch.token_ids, noise, self._greedy_flags[1])
        return codes, base

    def _frames(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        noise: torch.Tensor,
        is_greedy: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All codes of the frames that begin with these tokens, and what they are fed back as."""
        first = token_ids.long()
        first_embed = self.model.embed_input_ids(first)
        others, total = self.code_predictor(hidden, first_embed, noise, is_greedy)
        return torch.cat([first.unsqueeze(1), others], dim=1), first_embed + total

    def warm_up(self, max_batch: int) -> None:
        weight = self.lm_head.weight
        num_draws = self.code_predictor.num_groups - 1

        def example(size: int) -> tuple[torch.Tensor, ...]:
            rows = torch.zeros(size, self.row_width, dtype=weight.dtype, device=weight.device)
            token_ids = torch.zeros(size, dtype=torch.int32, device=weight.device)
            flags = [False] * size
            noise = self._sampler.noise(num_draws, flags, [None] * size, weight.device)
            return rows, token_ids, noise, torch.tensor(flags, device=weight.device)

        if weight.device.type == "cuda":
            self.code_predictor.join_kernels()
            # One request first: the next batch then is compiled for every other size.
            self._frames(*example(1))
        self._make_frames.capture(max_batch, example)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Parts of the checkpoint that are other stages'."""
        return not name.startswith(_USED)
