"""Memory that runs out in a forward: half the batch once more, then an error of those requests."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tests.generation.bench import Bench
from tests.generation.tone import spoken
from vllm_omni.errors import MemoryExhaustedError, error_from_code
from vllm_omni.generation.memory_errors import is_out_of_memory


@pytest.fixture
def bench() -> Bench:
    logging.getLogger("vllm_omni.generation").setLevel(logging.CRITICAL)
    return Bench()


def test_a_batch_without_memory_runs_again_in_halves(bench: Bench) -> None:
    texts = {"a": "!memory=2", "b": "two", "c": "three", "d": "four"}
    for name, text in texts.items():
        bench.say(name, text)
    bench.run()

    assert bench.model.batches == [
        ["!memory=2", "two", "three", "four"],
        ["!memory=2", "two"],
        ["three", "four"],
    ]
    assert bench.pcm == {name: spoken(text) for name, text in texts.items()}
    assert bench.model.num_self_tests == 0


def test_what_finds_no_memory_in_half_the_batch_fails_and_the_rest_is_served(bench: Bench) -> None:
    texts = {"a": "!memory=0", "b": "two", "c": "three", "d": "four"}
    for name, text in texts.items():
        bench.say(name, text)
    bench.run()

    assert bench.failure("a") == (
        "out_of_memory",
        "stage voice has no memory for this request: no room for 2",
    )
    assert bench.failure("b")[0] == "out_of_memory"
    assert bench.pcm == {"c": spoken("three"), "d": spoken("four")}
    assert len(bench.model.batches) == 3
    assert bench.model.num_self_tests == 1, "is it the device?"
    error = error_from_code(*bench.failure("a"))
    assert isinstance(error, MemoryExhaustedError)
    assert (error.status, error.retryable) == (503, True)

    bench.say("next", "one")
    bench.run()
    assert bench.pcm["next"] == spoken("one")


def test_a_request_alone_is_tried_twice(bench: Bench) -> None:
    bench.say("a", "!memory=0")
    bench.run()

    assert bench.model.batches == [["!memory=0"]] * 2
    assert bench.failure("a")[0] == "out_of_memory"


def test_a_device_without_memory_ends_the_replica(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def self_test() -> None:
        raise MemoryError("still nothing")

    monkeypatch.setattr(bench.model, "self_test", self_test)
    bench.say("a", "!broken")
    with pytest.raises(MemoryError, match="still nothing"):
        bench.run()


def test_a_prompt_without_memory_is_its_own_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(prompt: object, params: object) -> tuple[object, list[object]]:
        raise MemoryError

    monkeypatch.setattr(bench.model, "start", start)
    bench.say("a", "one")
    bench.step()

    assert bench.failure("a")[0] == "out_of_memory"


OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})
OrtFail = type("Fail", (Exception,), {"__module__": "onnxruntime.capi.onnxruntime_pybind11_state"})


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        OutOfMemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OrtFail("bfc_arena.cc:376 Failed to allocate memory for requested buffer of size 4096"),
        OrtFail("std::bad_alloc"),
    ],
)
def test_memory_errors_of_libraries_are_known(error: Exception) -> None:
    assert is_out_of_memory(error)
    wrapped = ValueError("the forward failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


def test_numpy_has_its_own() -> None:
    with pytest.raises(MemoryError) as error:
        np.empty(1 << 50, np.float64)
    assert is_out_of_memory(error.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        ValueError("cannot say 'I am out of memory'"),
        OrtFail("INVALID_ARGUMENT: unexpected input"),
    ],
)
def test_other_errors_are_not(error: Exception) -> None:
    assert not is_out_of_memory(error)
