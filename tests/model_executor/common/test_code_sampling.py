"""Codes of a batch: greedy or drawn, each request by its own seed."""

from __future__ import annotations

import torch

from vllm_omni.model_executor.models.common.code_sampling import CodeSampler

LOGITS = torch.tensor([[0.0, 3.0, 2.0, -9.0], [5.0, 4.9, 4.8, 4.7]])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_greedy_takes_the_best() -> None:
    sampler = CodeSampler(top_k=3, top_p=0.9)
    assert sampler(LOGITS, (True, True), (None, None)).tolist() == [1, 0]


def test_one_greedy_request_among_others_stays_greedy() -> None:
    sampler = CodeSampler(top_k=4, top_p=1.0)
    firsts = {sampler(LOGITS, (True, False), (None, seeded(seed)))[0].item() for seed in range(30)}
    assert firsts == {1}


def test_top_k_and_top_p_cut_off_what_is_unlikely() -> None:
    drawn = {
        code
        for seed in range(60)
        for code in CodeSampler(top_k=3, top_p=0.8)(
            LOGITS, (False, False), (seeded(seed), seeded(seed))
        ).tolist()[:1]
    }
    assert drawn == {1, 2}, "0 is past 0.8 of the weight, 3 past the third place"


def test_a_seed_gives_the_same_whoever_else_is_there() -> None:
    sampler = CodeSampler(top_k=4, top_p=1.0)
    alone = [sampler(LOGITS[1:], (False,), (seeded(seed),)).item() for seed in range(20)]
    beside = [sampler(LOGITS, (False, False), (None, seeded(seed)))[1].item() for seed in range(20)]
    assert alone == beside
    assert len(set(alone)) > 1, "seeds differ"


def test_draws_follow_the_probabilities() -> None:
    sampler = CodeSampler(top_k=2, top_p=1.0)
    logits = torch.tensor([[1.0, 0.0]]).log_softmax(-1)
    generator = seeded(0)
    drawn = [sampler(logits, (False,), (generator,)).item() for _ in range(2000)]
    assert abs(drawn.count(0) / 2000 - 0.731) < 0.03
