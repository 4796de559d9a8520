"""Memory that runs out in a forward: in halves again, until who finds none has failed alone."""

from __future__ import annotations

import numpy as np
import pytest

from tests.generation.bench import Bench
from tests.generation.tone import spoken
from vllm_omni.errors import MemoryExhaustedError, error_from_code
from vllm_omni.generation.memory_errors import halves, is_out_of_memory


@pytest.fixture
def bench() -> Bench:
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


def test_who_never_finds_memory_fails_alone(bench: Bench) -> None:
    texts = {"a": "!memory=0", "b": "two", "c": "three", "d": "four"}
    for name, text in texts.items():
        bench.say(name, text)
    bench.run()

    assert bench.model.batches == [
        ["!memory=0", "two", "three", "four"],
        ["!memory=0", "two"],
        ["three", "four"],
        ["!memory=0"],
        ["two"],
    ]
    assert bench.failure("a") == (
        "out_of_memory",
        "stage voice has no memory for this request: no room for 1",
    )
    assert bench.pcm == {name: spoken(text) for name, text in texts.items() if name != "a"}
    assert bench.model.num_self_tests == 1, "is it the device?"
    error = error_from_code(*bench.failure("a"))
    assert isinstance(error, MemoryExhaustedError)
    assert (error.status, error.retryable) == (503, True)

    bench.say("next", "one")
    bench.run()
    assert bench.pcm["next"] == spoken("one")


def test_memory_for_one_at_a_time_is_enough_for_all() -> None:
    bench = Bench(max_batch_size=6)
    texts = {"a": "!memory=1", **{f"r{i}": "!memory=1" for i in range(5)}}
    for name, text in texts.items():
        bench.say(name, text)
    bench.run()

    assert bench.pcm == {name: spoken(text) for name, text in texts.items()}
    assert [len(batch) for batch in bench.model.batches] == [6, 3, 3, *[1] * 6]


@pytest.mark.parametrize("place", [0, 5, 15])
def test_finding_who_it_is_costs_two_forwards_for_each_halving(place: int) -> None:
    bench = Bench(max_batch_size=16)
    for i in range(16):
        bench.say(f"r{i}", "!memory=0" if i == place else "one")
    bench.run()

    assert len(bench.model.batches) == 1 + 2 * 4
    assert [name for name, output in bench.ended.items() if output.failure] == [f"r{place}"]


def test_halves_end_one_by_one() -> None:
    assert [list(halves(count)) for count in (1, 2, 3, 8)] == [[1], [1], [1], [4, 2, 1]]


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
