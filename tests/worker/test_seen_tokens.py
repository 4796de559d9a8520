"""The table of repetition penalties against vLLM's own."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.utils import apply_penalties

from vllm_omni.worker.seen_tokens import SeenTokens

VOCABULARY = 40
CPU = torch.device("cpu")


def by_vllm(logits: torch.Tensor, said: list[list[int]], penalties: list[float]) -> torch.Tensor:
    longest = max(map(len, said))
    padded = torch.tensor([ids + [VOCABULARY] * (longest - len(ids)) for ids in said])
    none = torch.zeros(len(said))
    prompts = torch.full((len(said), 1), VOCABULARY)
    return apply_penalties(
        logits.clone(), prompts, padded, none, none.clone(), torch.tensor(penalties)
    )


def test_steps_of_a_changing_batch_are_penalised_as_vllm_does() -> None:
    torch.manual_seed(0)
    seen = SeenTokens(VOCABULARY, 32, CPU)
    said: dict[str, list[int]] = {"a": [1, 2, 2], "b": [7], "c": []}
    penalties = {"a": 1.3, "b": 0.8, "c": 1.0}
    for name in ("a", "b"):
        seen.add(name, said[name], penalties[name])
    for order in (["a", "b", "c"], ["a", "b", "c"], ["b", "c", "a"], ["c", "a"]):
        logits = torch.randn(len(order), VOCABULARY)
        expected = by_vllm(
            logits, [said[name] or [VOCABULARY] for name in order], [penalties[n] for n in order]
        )
        torch.testing.assert_close(seen.penalised(logits, order), expected)
        sampled = torch.randint(VOCABULARY, (len(order),), dtype=torch.int32)
        seen.note(sampled, order, [True] * len(order))
        for name, token_id in zip(order, sampled.tolist(), strict=True):
            said[name].append(token_id)


def test_a_step_that_only_read_marks_nothing() -> None:
    seen = SeenTokens(VOCABULARY, 32, CPU)
    seen.add("a", [], 2.0)
    seen.add("b", [], 2.0)
    seen.note(torch.tensor([3, 3]), ["a", "b"], [False, True])
    logits = torch.ones(2, VOCABULARY)
    a, b = seen.penalised(logits, ["a", "b"])
    assert a.tolist() == [1.0] * VOCABULARY
    assert b[3] == 0.5


def test_a_row_that_is_used_again_remembers_nothing() -> None:
    seen = SeenTokens(VOCABULARY, 32, CPU)
    for i in range(100):  # more than there are rows at first, and some stay
        seen.add(f"r{i}", [5], 2.0)
        if i % 3:
            seen.finish([f"r{i}", "never heard of"])
    seen.add("new", [6], 2.0)
    (row,) = seen.penalised(torch.ones(1, VOCABULARY), ["new"])
    assert (row[5], row[6]) == (1.0, 0.5)


def test_without_penalties_logits_are_left_alone() -> None:
    seen = SeenTokens(VOCABULARY, 32, CPU)
    logits = torch.randn(2, VOCABULARY, dtype=torch.bfloat16)
    assert seen.penalised(logits, ["a", "b"]) is logits
    seen.note(torch.tensor([1, 2]), ["a", "b"], [True, True])
