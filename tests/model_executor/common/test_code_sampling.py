"""Codes of a batch: greedy or drawn, each request by its own seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_omni.model_executor.models.common.code_sampling import CodeSampler

LOGITS = torch.tensor([[0.0, 3.0, 2.0, -9.0], [5.0, 4.9, 4.8, 4.7]])
CPU = torch.device("cpu")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes(
    sampler: CodeSampler,
    is_greedy: Sequence[bool],
    generators: Sequence[torch.Generator | None],
    logits: torch.Tensor = LOGITS,
) -> list[int]:
    noise = sampler.noise(1, is_greedy, generators, CPU)
    chosen: list[int] = sampler.choose(logits, noise[:, 0], torch.tensor(is_greedy)).tolist()
    return chosen


def test_greedy_takes_the_best() -> None:
    assert codes(CodeSampler(top_k=3, top_p=0.9), (True, True), (None, None)) == [1, 0]


def test_one_greedy_request_among_others_stays_greedy() -> None:
    sampler = CodeSampler(top_k=4, top_p=1.0)
    firsts = {codes(sampler, (True, False), (None, seeded(seed)))[0] for seed in range(30)}
    assert firsts == {1}


def test_top_k_and_top_p_cut_off_what_is_unlikely() -> None:
    sampler = CodeSampler(top_k=3, top_p=0.8)
    drawn = {codes(sampler, (False, True), (seeded(seed), None))[0] for seed in range(60)}
    assert drawn == {1, 2}, "0 is past 0.8 of the weight, 3 past the third place"


def test_a_seed_gives_the_same_whoever_else_is_there() -> None:
    sampler = CodeSampler(top_k=4, top_p=1.0)
    alone = [codes(sampler, (False,), (seeded(seed),), LOGITS[1:])[0] for seed in range(20)]
    beside = [codes(sampler, (False, False), (None, seeded(seed)))[1] for seed in range(20)]
    assert alone == beside
    assert len(set(alone)) > 1, "seeds differ"


def test_draws_follow_the_probabilities() -> None:
    sampler = CodeSampler(top_k=2, top_p=1.0)
    noise = sampler.noise(2000, (False,), (seeded(0),), CPU)[0]
    logits = torch.tensor([[1.0, 0.0]]).expand(2000, 2)
    drawn = sampler.choose(logits, noise, torch.zeros(2000, dtype=torch.bool)).tolist()
    assert abs(drawn.count(0) / 2000 - 0.731) < 0.03
