"""Sampling of a conditioned stage in few launches: a recorded graph for batches of plain requests.

A talker's step is short, and vLLM's sampler is some forty small kernels, each launched by the host,
that the device waits for. What most requests ask for (a repetition penalty, a temperature, top-k,
top-p, a seed, a least length) has one shape for all; a batch with any other wish is left to vLLM's.

B requests, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from vllm_omni.platforms.graphs import BatchGraphs
from vllm_omni.worker.seen_tokens import SeenTokens, penalised

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are 0, as in vLLM."""


class PlainDraws:
    """Draws tokens as vLLM's sampler does; a seeded request gets the same ones."""

    def __init__(self, seen: SeenTokens) -> None:
        self._seen = seen
        self._graphs = BatchGraphs(self._draw)
        self._recorded: torch.Tensor | None = None
        """The table of seen tokens that the graphs read."""
        self._wishes: tuple[SamplingMetadata | None, tuple[str, ...], torch.Tensor]
        self._wishes = None, (), torch.empty(0)

    def capture(self, max_batch: int) -> None:
        """Record graphs for batches up to a size, where the device has them."""
        table = self._seen.table

        def example(size: int) -> tuple[torch.Tensor, ...]:
            noise = torch.ones(size, table.shape[1], device=table.device)
            wishes = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0]] * size, device=table.device)
            return torch.zeros_like(noise), noise, wishes

        self._graphs.capture(max_batch, example)
        self._recorded = table

    def draw(
        self, logits: torch.Tensor, metadata: SamplingMetadata, request_ids: Sequence[str]
    ) -> torch.Tensor | None:
        """Tokens `[B]` from logits `[B, V]`, unpenalised; None for a batch that is not plain."""
        if not is_plain(metadata):
            return None
        wishes = self._wishes_of(metadata, tuple(request_ids))
        for processor in metadata.logitsprocs.non_argmax_invariant:
            if isinstance(processor, MinTokensLogitsProcessor) and processor.min_toks:
                logits = processor.apply(logits.float())
        noise = self._noise(logits, metadata)
        if self._recorded is self._seen.table:
            (tokens,) = self._graphs(logits, noise, wishes)
        else:
            (tokens,) = self._draw(logits, noise, wishes)
        return tokens

    def _wishes_of(self, metadata: SamplingMetadata, request_ids: tuple[str, ...]) -> torch.Tensor:
        """`[B, 5]`: row of seen tokens, repetition penalty, temperature, top-k, top-p. One tensor,
        made anew only with the batch: vLLM has new metadata for every other one."""
        if self._wishes[0] is not metadata or self._wishes[1] != request_ids:
            vocab_size = self._seen.table.shape[1]
            rows, penalties = self._seen.in_order(request_ids)
            columns = [
                rows,
                penalties[:, 0],
                _or_all(metadata.temperature, 0.0, rows),
                _or_all(metadata.top_k, vocab_size, rows),
                _or_all(metadata.top_p, 1.0, rows),
            ]
            wishes = torch.stack([column.to(torch.float32) for column in columns], dim=1)
            self._wishes = metadata, request_ids, wishes
        return self._wishes[2]

    def _noise(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        noise = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        if metadata.all_greedy:
            return noise.fill_(1.0)
        if len(metadata.generators) != logits.shape[0]:
            noise.exponential_()
        for row, generator in metadata.generators.items():
            noise[row].exponential_(generator=generator)
        return noise

    def _draw(
        self, logits: torch.Tensor, noise: torch.Tensor, wishes: torch.Tensor
    ) -> tuple[torch.Tensor]:
        rows, penalties, temperature, top_k, top_p = wishes.split(1, dim=1)
        logits = penalised(logits, self._seen.table.index_select(0, rows[:, 0].long()), penalties)
        is_greedy = temperature < GREEDY_BELOW
        likeliest = logits.argmax(dim=-1, keepdim=True)
        scaled = logits / temperature.masked_fill(is_greedy, 1.0)
        kept = apply_top_k_top_p_pytorch(scaled, top_k[:, 0].long(), top_p[:, 0])
        # The largest of p / e, with e exponential, falls on each token with its probability.
        drawn = (kept.softmax(dim=-1) / noise).argmax(dim=-1, keepdim=True)
        return (torch.where(is_greedy, likeliest, drawn)[:, 0],)


def is_plain(metadata: SamplingMetadata) -> bool:
    """Whether all that the requests of a batch ask for is what `PlainDraws` knows."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and metadata.no_penalties
        and (holder is None or not holder.has_tracked_requests())
        and all(_is_plain(processor) for processor in metadata.logitsprocs.all)
    )


def _is_plain(processor: LogitsProcessor) -> bool:
    """Whether it does nothing now, or only bars the ends of requests that are too short yet."""
    match processor:
        case MinPLogitsProcessor():
            return not processor.min_p_count
        case LogitBiasLogitsProcessor():
            return not processor.biases
        case MinTokensLogitsProcessor():
            return True
    return False


def _or_all(column: Any, value: float, like: torch.Tensor) -> torch.Tensor:
    """A column of the metadata, which is None where no request set it."""
    if column is None:
        return torch.full_like(like, value, dtype=torch.float32)
    return column[: like.shape[0]]  # type: ignore[no-any-return]
