"""The diffusion engine: who steps together, who joins and leaves, and whose failure is whose."""

from __future__ import annotations

import numpy as np
import pytest

from tests.diffusion.bench import STEP_S, Bench
from tests.diffusion.stripes import StripePipeline, WholePipeline, drawn
from vllm_omni.diffusion.executor.jobs import Lane, Step
from vllm_omni.diffusion.worker.isolation import NARROW_STEPS
from vllm_omni.diffusion.worker.model_runner import MAX_FAILED_IN_A_ROW


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_one_request_is_made_and_says_how_far_it_is(bench: Bench) -> None:
    made = bench.add("a")
    bench.run()

    assert np.array_equal(bench.pixels("a"), drawn(made))
    assert bench.progress["a"] == [1, 2, 3, 4]
    assert repr(bench.engine) == "<DiffusionEngine dit <ItemTable waiting=0 []>>"


def test_four_together_take_little_more_than_one(bench: Bench) -> None:
    """A forward costs the same whatever its size: one after another would take 4 times as long."""
    for name in "abcd":
        bench.add(name, num_inference_steps=20)
    bench.run()

    assert bench.now <= 1.2 * 20 * STEP_S
    assert max(len(batch) for batch in bench.pipeline.batches) == 4


def test_members_of_a_batch_are_at_different_steps(bench: Bench) -> None:
    made = {"a": bench.add("a", num_inference_steps=6)}
    bench.turn(5)
    made["b"] = bench.add("b", seed=7, num_inference_steps=3)
    bench.run()

    assert ["a", "b"] in bench.pipeline.batches
    assert bench.progress["a"] == [1, 2, 3, 4, 5, 6]
    assert bench.progress["b"] == [1, 2, 3]
    for name, one in made.items():
        assert np.array_equal(bench.pixels(name), drawn(one))


def test_joining_and_leaving_cost_the_others_no_step(bench: Bench) -> None:
    bench.add("long", num_inference_steps=10)
    bench.turn(3)
    for name in "abc":
        bench.add(name, num_inference_steps=2)
    bench.turn(3)
    bench.engine.abort(["b"])
    bench.run()

    assert bench.ended_s["long"] == 10 * STEP_S
    assert set(bench.ended) == {"long", "a", "c"}


def test_an_abort_in_the_middle_ends_the_work_within_a_step(bench: Bench) -> None:
    bench.add("a", num_inference_steps=50)
    bench.add("b", num_inference_steps=8)
    bench.turn(5)
    bench.engine.abort(["a", "never heard of"])
    before = sum("a" in batch for batch in bench.pipeline.batches)
    bench.run()

    assert sum("a" in batch for batch in bench.pipeline.batches) <= before + 1
    assert set(bench.ended) == {"b"}
    assert len(bench.runner._states) == 0


def test_an_abort_while_it_is_encoded_leaves_nothing_behind(bench: Bench) -> None:
    bench.add("a")
    bench.engine.step()
    bench.engine.abort(["a"])
    bench.executor.turn()
    bench.turn(2)

    assert len(bench.runner._states) == 0
    assert not bench.ended


def test_a_deadline_is_kept_at_every_step(bench: Bench) -> None:
    bench.add("late", num_inference_steps=50, deadline_s=5.5 * STEP_S)
    bench.add("good", num_inference_steps=8, deadline_s=100.0)
    bench.run()

    assert bench.failure("late") == (
        "deadline_exceeded",
        "stage dit: the deadline passed at step 6 of 50",
    )
    assert bench.ended_s["late"] == 6 * STEP_S
    assert bench.ended["good"].failure is None


def test_a_deadline_also_ends_the_wait_for_a_turn() -> None:
    bench = Bench(max_batch_size=1, max_prepared=1)
    bench.add("first", num_inference_steps=10)
    bench.add("late", deadline_s=3.5)
    bench.run()

    assert bench.failure("late")[1] == (
        "stage dit: the deadline passed while waiting for its turn behind 1 others"
    )


def test_another_size_takes_turns_and_neither_starves(bench: Bench) -> None:
    bench.add("big", width=64, num_inference_steps=4)
    for name in "abc":
        bench.add(name, num_inference_steps=4)
    bench.run()

    sizes = [set(batch) == {"big"} for batch in bench.pipeline.batches]
    assert all({"big"} == set(batch) or "big" not in batch for batch in bench.pipeline.batches)
    assert sizes.count(True) == 4
    assert bench.ended_s["big"] <= 8 * STEP_S


def test_a_stream_of_new_requests_does_not_starve_an_old_one() -> None:
    bench = Bench(max_batch_size=2, max_prepared=4)
    bench.add("old", width=64, num_inference_steps=5)
    for i in range(30):
        bench.add(f"new{i}", num_inference_steps=1)
    bench.run()

    assert bench.ended_s["old"] <= 15 * STEP_S  # all together take 20 and more


def test_who_came_first_is_done_first(bench: Bench) -> None:
    for i in range(12):
        bench.add(f"r{i}", num_inference_steps=3)
    bench.run()

    assert list(bench.ended) == [f"r{i}" for i in range(12)]
    assert all(len(batch) <= 4 for batch in bench.pipeline.batches)


def test_no_more_are_prepared_than_may_be() -> None:
    bench = Bench(max_batch_size=2, max_prepared=3)
    for i in range(10):
        bench.add(f"r{i}", num_inference_steps=5)
    for _ in range(12):
        bench.turn()
        assert bench.runner.figures()["num_states"] <= 3
    bench.run()

    assert len(bench.ended) == 10


def test_an_exception_at_step_k_of_one_of_four_fails_it_alone(bench: Bench) -> None:
    made = {name: bench.add(name) for name in "abd"}
    bench.add("c", "!step3 c")
    bench.run()

    assert bench.failure("c") == ("request_failed", "stage dit failed: ValueError: cannot go on")
    for name, one in made.items():
        assert np.array_equal(bench.pixels(name), drawn(one))
    after = bench.add("after")
    bench.run()
    assert np.array_equal(bench.pixels("after"), drawn(after))


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("!encode x", "cannot encode that"),
        ("!decode x", "cannot decode that"),
        ("!nan x", "NaN"),
        ("!still x", "took 0 steps instead of 1"),
    ],
)
def test_whatever_fails_fails_its_request_alone(bench: Bench, prompt: str, text: str) -> None:
    good = bench.add("good")
    bench.add("bad", prompt)
    bench.run()

    assert text in bench.failure("bad")[1]
    assert np.array_equal(bench.pixels("good"), drawn(good))
    assert bench.runner.figures()["num_states"] == 0


def test_a_batch_that_fails_as_a_whole_runs_one_by_one(bench: Bench) -> None:
    made = {"a": bench.add("a"), "b": bench.add("b", "!batch b")}
    bench.run()

    for name, one in made.items():
        assert np.array_equal(bench.pixels(name), drawn(one))


@pytest.mark.parametrize("names", ["ab", "abcd"])
def test_memory_for_one_at_a_time_is_enough_for_all(bench: Bench, names: str) -> None:
    made = {name: bench.add(name, f"!oom {name}") for name in names}
    bench.run()

    for name, one in made.items():
        assert np.array_equal(bench.pixels(name), drawn(one))


def test_a_batch_that_had_no_memory_stays_in_halves_for_a_while(bench: Bench) -> None:
    for name in "ab":
        bench.add(name, f"!oom {name}", num_inference_steps=NARROW_STEPS + 10)
    bench.run()
    together = sum(len(batch) == 2 for batch in bench.pipeline.batches)

    assert not any(output.failure for output in bench.ended.values())
    assert together == 2

    for name in "cd":  # nobody was here in between
        bench.add(name, f"!oom {name}")
    bench.run()
    assert sum(len(batch) == 2 for batch in bench.pipeline.batches) == 3


def test_who_never_finds_memory_fails_alone_and_does_not_split_the_others(bench: Bench) -> None:
    for name in "abd":
        bench.add(name, num_inference_steps=10)
    bench.turn(7)
    bench.add("c", "!starved c", num_inference_steps=10)
    bench.run()

    assert ["a", "b", "d", "c"] in bench.pipeline.batches
    assert [name for name, output in bench.ended.items() if output.failure] == ["c"]
    after = bench.pipeline.batches.index(["a", "b", "d", "c"]) + 1
    assert bench.pipeline.batches[after : after + 4] == [["a", "b"], ["d", "c"], ["d"], ["c"]]
    assert ["a", "b", "d"] in bench.pipeline.batches[after + 4 :]


def test_what_finds_no_memory_fails_and_the_next_one_works(bench: Bench) -> None:
    bench.add("a", "!starved a")
    bench.run()
    good = bench.add("good")
    bench.run()

    assert bench.failure("a")[0] == "out_of_memory"
    assert np.array_equal(bench.pixels("good"), drawn(good))


def test_a_decode_without_memory_is_done_in_tiles(bench: Bench) -> None:
    made = bench.add("a", "!tiles a")
    bench.run()

    assert np.array_equal(bench.pixels("a"), drawn(made))
    assert not bench.pipeline.vae.use_tiling


def test_failures_in_a_row_put_the_pipeline_to_the_test(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(states: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(bench.pipeline, "denoise_step", broken)
    for i in range(MAX_FAILED_IN_A_ROW):
        bench.add(f"r{i}", width=32 + 16 * i)

    with pytest.raises(RuntimeError, match="the device is gone"):
        bench.run()


def test_an_equal_prompt_is_encoded_once(bench: Bench) -> None:
    bench.add("a", "a tree", seed=1)
    bench.add("b", "a tree", seed=2)
    bench.run()

    assert bench.pipeline.encoded == ["a tree"]
    assert bench.pixels("a").tobytes() != bench.pixels("b").tobytes()


def test_previews_come_at_their_interval(bench: Bench) -> None:
    bench.add("a", num_inference_steps=9, preview_interval=3)
    bench.run()

    steps = [output.progress.step for output in bench.previews["a"] if output.progress]
    assert len(steps) == 2
    assert bench.previews["a"][0].preview is not None


def test_a_stop_fails_everyone_who_is_here(bench: Bench) -> None:
    bench.add("a")
    bench.add("b")
    bench.turn(2)

    outputs = bench.engine.fail_all("replica_died", "stage dit was stopped")

    assert sorted(output.request_id for output in outputs) == ["a", "b"]
    assert len(bench.engine) == 0


def test_an_id_that_is_here_already_changes_nothing(bench: Bench) -> None:
    first = bench.add("a", seed=1)
    bench.add("a", seed=2)
    bench.run()

    assert np.array_equal(bench.pixels("a"), drawn(first))


def test_denoising_goes_on_while_another_is_encoded_or_decoded(bench: Bench) -> None:
    for name in "abc":
        bench.add(name, num_inference_steps=6)
    for _ in range(4):
        bench.engine.step()
        assert not bench.executor.is_idle(Lane.MEDIA) or bench.executor.log
        bench.executor.turn()

    assert any(isinstance(job, Step) for job in bench.executor.log[:3])


def test_a_whole_run_reports_its_steps_and_stops_when_told() -> None:
    pipeline = WholePipeline()
    bench = Bench(pipeline)
    made = bench.add("a")
    bench.add("b", num_inference_steps=10)

    def abort(request: object, step: int) -> None:
        if step == 3 and pipeline.steps and pipeline.steps[-1][0] == "b":
            bench.engine.abort(["b"])

    pipeline.on_step = abort
    bench.run()
    bench.turn(2)

    assert np.array_equal(bench.pixels("a"), drawn(made))
    assert bench.progress["a"] == [1, 2, 3, 4]
    assert pipeline.steps[-1] == ("b", 3)
    assert set(bench.ended) == {"a"}


def test_a_whole_run_that_fails_fails_alone() -> None:
    bench = Bench(WholePipeline())
    bench.add("bad", "!step2 x")
    good = bench.add("good")
    bench.run()

    assert "cannot go on" in bench.failure("bad")[1]
    assert np.array_equal(bench.pixels("good"), drawn(good))


def test_figures_say_how_much_there_is_to_do() -> None:
    bench = Bench(StripePipeline(), max_batch_size=2, max_prepared=2)
    for i in range(5):
        bench.add(f"r{i}")
    bench.turn(3)

    figures = bench.engine.figures()
    assert (figures["num_running"], figures["num_waiting"]) == (2, 3)
    assert figures["num_runnable"] == 2
    before = figures["progress"]
    bench.turn(2)
    assert bench.engine.figures()["progress"] > before


def test_a_lane_that_hangs_is_no_progress_though_the_other_one_goes_on(bench: Bench) -> None:
    bench.add("stuck", num_inference_steps=50)
    bench.turn(3)
    bench.executor.hanging.add(Lane.DENOISE)
    bench.turn(2)
    before = bench.engine.figures()["progress"]
    bench.engine.abort(["stuck"])
    for name in "abc":
        bench.add(name)
        bench.turn()

    figures = bench.engine.figures()
    assert figures["progress"] == before
    assert figures["num_runnable"] > 0
