"""Deadlines a core keeps for requests that nobody aborts."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams

from vllm_omni.core.request_deadlines import GRACE_S, REMAINING_KEY, RequestDeadlines


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def params(remaining_s: float) -> SamplingParams:
    return SamplingParams(extra_args={REMAINING_KEY: remaining_s})


def test_the_late_ones_that_still_run_are_taken_once() -> None:
    clock = Clock()
    deadlines = RequestDeadlines(clock)
    for request_id, remaining_s in {"over": 1.0, "late": 2.0, "early": 9.0}.items():
        deadlines.add(request_id, params(remaining_s))
    deadlines.add("none", SamplingParams())
    deadlines.add("nothing", None)
    alive = {"late", "early", "none"}

    assert deadlines.expired(alive, 3) == []
    clock.now_s += 2.0 + GRACE_S
    assert deadlines.expired(alive, 3) == ["late"]
    assert deadlines.expired(alive, 3) == []
    assert len(deadlines) == 1


def test_requests_that_are_over_do_not_pile_up() -> None:
    deadlines = RequestDeadlines(Clock())
    for i in range(10_000):
        deadlines.add(f"r{i}", params(600.0))
        deadlines.expired({f"r{i}"}, 1)

    assert len(deadlines) < 2000
    clock = Clock()
    clock.now_s += 700
    deadlines._clock = clock
    assert deadlines.expired({"r9999"}, 1) == ["r9999"]
