"""Sampling of plain batches: the same tokens as vLLM's sampler, and what is left to it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_omni.worker.plain_draws import PlainDraws, is_plain
from vllm_omni.worker.seen_tokens import SeenTokens

CPU = torch.device("cpu")
VOCABULARY = 50
IDS = ("a", "b", "c", "d")


def metadata(**changes: Any) -> SamplingMetadata:
    """Four seeded requests; without changes all are drawn from the whole vocabulary."""
    nothing = torch.zeros(len(IDS))
    plain = SamplingMetadata(
        temperature=torch.tensor([1.0, 0.7, 0.0, 1.5]),
        all_greedy=False,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={i: torch.Generator().manual_seed(i) for i in range(len(IDS))},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing + 1,
        output_token_ids=[[] for _ in IDS],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return dataclasses.replace(plain, **changes)


def seen_tokens() -> SeenTokens:
    seen = SeenTokens(VOCABULARY, len(IDS), CPU)
    seen.add("a", [1, 2, 3], 1.3)
    seen.add("c", list(range(40)), 2.0)
    return seen


def by_vllm(logits: torch.Tensor, wishes: SamplingMetadata) -> list[int]:
    sampler = Sampler()
    sampler.topk_topp_sampler.forward = sampler.topk_topp_sampler.forward_native
    sampled = sampler(logits=seen_tokens().penalised(logits, IDS), sampling_metadata=wishes)
    return sampled.sampled_token_ids[:, 0].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": torch.tensor([5, 50, 3, 1], dtype=torch.int32)},
        {"top_p": torch.tensor([0.5, 1.0, 0.9, 0.1])},
        {
            "top_k": torch.tensor([5, 50, 3, 20], dtype=torch.int32),
            "top_p": torch.tensor([0.9, 0.3, 0.9, 1.0]),
        },
        {"temperature": None, "all_greedy": True},
        {"temperature": torch.tensor([0.3, 0.7, 2.0, 1.5]), "all_random": True},
    ],
)
def test_seeded_requests_get_the_tokens_that_vllm_draws(changes: dict[str, Any]) -> None:
    draws = PlainDraws(seen_tokens())
    theirs, ours = metadata(**changes), metadata(**changes)
    for step in range(20):
        logits = 4 * torch.randn(
            len(IDS), VOCABULARY, generator=torch.Generator().manual_seed(step)
        )
        tokens = draws.draw(logits.clone(), ours, IDS)

        assert tokens is not None
        assert tokens.tolist() == by_vllm(logits, theirs)


def test_draws_follow_the_probabilities() -> None:
    draws = PlainDraws(SeenTokens(VOCABULARY, 2, CPU))
    wishes = metadata(
        temperature=torch.ones(2), all_random=True, generators={}, top_k=torch.tensor([3, 3])
    )
    logits = torch.full((2, VOCABULARY), -9.0)
    logits[:, :4] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    torch.manual_seed(0)
    counts = torch.zeros(VOCABULARY)
    for _ in range(1000):
        tokens = draws.draw(logits, wishes, ("x", "y"))
        assert tokens is not None
        counts += torch.bincount(tokens, minlength=VOCABULARY)

    expected = torch.tensor([0.5, 0.3, 0.15]) / 0.95
    assert counts[3:].sum() == 0
    torch.testing.assert_close(counts[:3] / 2000, expected, atol=0.05, rtol=0)


def test_wishes_are_read_anew_with_the_batch() -> None:
    seen = seen_tokens()
    draws = PlainDraws(seen)
    greedy = metadata(temperature=None, all_greedy=True, generators={})
    logits = torch.zeros(4, VOCABULARY)
    logits[:, 7], logits[:, 45] = 2.0, 1.5

    first = draws.draw(logits, greedy, IDS)
    seen.finish(["c"])
    second = draws.draw(logits, dataclasses.replace(greedy), IDS)

    assert first is not None
    assert second is not None
    assert first.tolist() == [7, 7, 45, 7]  # 7 was seen by c, and twice its penalty is less
    assert second.tolist() == [7, 7, 7, 7]


def busy(kind: type, **fields: object) -> Any:
    processor = object.__new__(kind)
    vars(processor).update(fields)
    return processor


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_logprobs": 0},
        {"logprob_token_ids": {0: [1]}},
        {"allowed_token_ids_mask": torch.ones(4, VOCABULARY, dtype=torch.bool)},
        {"bad_words_token_ids": {0: [[1]]}},
        {"no_penalties": False},
        {"logitsprocs": LogitsProcessors([busy(MinPLogitsProcessor, min_p_count=1)])},
        {"logitsprocs": LogitsProcessors([busy(LogitBiasLogitsProcessor, biases={0: {1: 2.0}})])},
    ],
)
def test_other_wishes_are_left_to_vllm(changes: dict[str, Any]) -> None:
    draws = PlainDraws(seen_tokens())

    assert is_plain(metadata())
    assert draws.draw(torch.zeros(4, VOCABULARY), metadata(**changes), IDS) is None


def at_least(count: int) -> LogitsProcessors:
    """The second and third request may not end with tokens 7 and 8 before so many tokens."""
    processor = MinTokensLogitsProcessor(VllmConfig(), CPU, False)
    params = SamplingParams(min_tokens=count, stop_token_ids=[7, 8])
    prompts: list[int] = []
    added = [(i, params, prompts, prompts) for i in (1, 2)]
    processor.update_state(BatchUpdate(len(IDS), removed=[], added=added, moved=[]))
    return LogitsProcessors([processor])


def test_requests_that_are_too_short_do_not_end() -> None:
    draws = PlainDraws(seen_tokens())
    logits = torch.randn(len(IDS), VOCABULARY, dtype=torch.bfloat16)
    logits[:, 7], logits[:, 8] = 50.0, 40.0
    wishes = {"temperature": None, "all_greedy": True, "generators": {}}

    free = draws.draw(logits.clone(), metadata(**wishes), IDS)
    bound = draws.draw(logits.clone(), metadata(**wishes, logitsprocs=at_least(5)), IDS)

    assert free is not None
    assert bound is not None
    assert free.tolist() == [7, 7, 7, 7]
    assert (bound[0], bound[3]) == (7, 7)
    assert not {7, 8} & {int(bound[1]), int(bound[2])}
    expected = by_vllm(logits.float(), metadata(**wishes, logitsprocs=at_least(5)))
    assert bound.tolist() == expected


def test_idle_processors_are_plain() -> None:
    idle = LogitsProcessors(
        [
            busy(MinPLogitsProcessor, min_p_count=0),
            busy(LogitBiasLogitsProcessor, biases={}),
            busy(MinTokensLogitsProcessor, min_toks={}),
        ]
    )

    assert is_plain(metadata(logitsprocs=idle))


@pytest.mark.gpu
def test_graphs_draw_what_the_function_draws() -> None:
    device = torch.device("cuda")
    seen = SeenTokens(VOCABULARY, 4, device)
    seen.add("a", [1, 2, 3], 1.3)
    recorded, plain = PlainDraws(seen), PlainDraws(seen)
    recorded.capture(4)
    for step in range(20):
        logits = 4 * torch.randn(4, VOCABULARY, device=device)
        tokens = []
        for draws in (recorded, plain):
            wishes = metadata(
                temperature=torch.tensor([1.0, 0.7, 0.0, 1.5], device=device),
                top_k=torch.tensor([5, 50, 3, 20], device=device),
                generators={i: torch.Generator(device).manual_seed(4 * step + i) for i in range(4)},
            )
            drawn = draws.draw(logits.clone(), wishes, IDS)
            assert drawn is not None
            tokens.append(drawn.tolist())
        assert tokens[0] == tokens[1]
