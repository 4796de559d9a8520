"""Encoded prompts are kept within their bound, and found by equal keys only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_omni.diffusion.conditioning import ConditioningCache, tensor_bytes


def test_what_was_not_used_for_longest_goes_first() -> None:
    cache = ConditioningCache(30)
    for key in "abc":
        cache.put(key, key.upper(), 10)
    assert cache.get("a") == "A"
    cache.put("d", "D", 10)

    assert cache.get("b") is None
    assert [cache.get(key) for key in "acd"] == ["A", "C", "D"]
    assert repr(cache) == "<ConditioningCache entries=3 bytes=30/30>"
    assert (cache.num_hits, cache.num_misses) == (4, 1)


def test_what_is_larger_than_the_bound_is_not_kept() -> None:
    cache = ConditioningCache(30)
    cache.put("a", "A", 10)
    cache.put("b", "B", 31)

    assert cache.get("a") == "A"
    assert cache.get("b") is None


def test_a_key_is_kept_once() -> None:
    cache = ConditioningCache(30)
    cache.put("a", "A", 10)
    cache.put("a", "other", 10)

    assert (cache.get("a"), cache.num_bytes) == ("A", 10)
    cache.clear()
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_the_bytes_of_all_tensors_are_counted() -> None:
    @dataclass
    class Pair:
        text: torch.Tensor
        more: dict[str, list[torch.Tensor]]

    pair = Pair(torch.zeros(3), {"x": [torch.zeros(2, dtype=torch.bfloat16)]})

    assert tensor_bytes(pair) == 12 + 4
    assert tensor_bytes((pair, "text", None)) == 16
