"""Who of a step that raised is failed, and who runs when until that is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import pytest
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_omni.core.quarantine import Quarantine


class FakeRequest:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.num_output_tokens = 0
        self.finished = False

    def is_finished(self) -> bool:
        return self.finished


class FakeScheduler:
    """Runs whatever waits; the queues are vLLM's."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting = FCFSRequestQueue()
        self.deferred_waiting: set[Request] = set()
        self.running: list[Request] = []
        self.num_recomputations = 0

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        assert reset_running_requests
        while self.running:
            self.waiting.prepend_request(self.running.pop())
        self.num_recomputations += 1
        return True

    def add(self, request_id: str) -> None:
        request = cast("Request", FakeRequest(request_id))
        self.requests[request_id] = request
        self.waiting.add_request(request)

    def finish(self, request_id: str) -> None:
        request = self.requests.pop(request_id)
        cast("FakeRequest", request).finished = True
        self.waiting.remove_requests([request])
        if request in self.running:
            self.running.remove(request)


class Core:
    """The loop around a quarantine, with a model that some requests make raise."""

    def __init__(self, names: str, bad: Iterable[str] = ()) -> None:
        self.scheduler = FakeScheduler()
        self.quarantine = Quarantine(cast("Scheduler", self.scheduler))
        self.bad = set(bad)
        self.failed: list[str] = []
        self.steps: list[str] = []
        for name in names:
            self.scheduler.add(name)

    def step(self, most_new: int = 100) -> None:
        self.quarantine.arrange()
        for _ in range(min(most_new, len(self.scheduler.waiting))):
            self.scheduler.running.append(self.scheduler.waiting.pop_request())
        names = [one.request_id for one in self.scheduler.running]
        self.steps.append("".join(names))
        if self.bad.intersection(names):
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
            culprit = self.quarantine.accuse(names)
            if culprit is not None:
                self.failed.append(culprit)
                self.scheduler.finish(culprit)
        else:
            for one in self.scheduler.running:
                cast("FakeRequest", one).num_output_tokens += 1
        self.quarantine.arrange()

    def run(self, num_steps: int = 40) -> None:
        for _ in range(num_steps):
            self.step()

    @property
    def everybody_runs(self) -> bool:
        running = {one.request_id for one in self.scheduler.running}
        return running == set(self.scheduler.requests) and len(self.quarantine) == 0


def test_a_core_without_faults_is_left_alone() -> None:
    core = Core("abcd")
    core.run(5)
    assert core.steps == ["abcd"] * 5
    assert core.scheduler.num_recomputations == 0
    assert repr(core.quarantine) == "<Quarantine current=0 groups=0 held=0>"


def test_the_only_request_of_a_step_is_the_one() -> None:
    core = Core("a", bad="a")
    core.step()
    assert core.failed == ["a"]


@pytest.mark.parametrize("bad", ["a", "c", "h", "ah", "cde", "abcdefgh"])
def test_only_those_that_raise_are_failed(bad: str) -> None:
    core = Core("abcdefgh", bad=bad)
    core.run()
    assert sorted(core.failed) == sorted(bad)
    assert core.everybody_runs


def test_it_takes_halves_and_each_alone() -> None:
    core = Core("abcdefgh", bad="f")
    core.run(8)
    assert core.steps == ["abcdefgh", "abcd", "efgh", "ef", "e", "f", "gh", "ghabcde"]


def test_a_fault_that_does_not_come_again_fails_nobody() -> None:
    core = Core("abcd", bad="a")
    core.step()
    core.bad.clear()
    core.run()
    assert core.failed == []
    assert core.everybody_runs


def test_who_comes_meanwhile_waits_and_is_not_accused() -> None:
    core = Core("abcd", bad="b")
    core.step()
    core.scheduler.add("z")
    core.bad.add("z")
    core.step()
    assert core.steps[-1] == "ab"
    assert len(core.quarantine) == 4
    core.run()
    assert sorted(core.failed) == ["b", "z"]
    assert core.everybody_runs


def test_suspects_that_leave_are_forgotten() -> None:
    core = Core("abcd", bad="ab")
    core.step()
    for name in "abd":
        core.scheduler.finish(name)
    core.run(3)
    assert core.failed == []
    assert core.everybody_runs


def test_a_group_that_does_not_fit_in_one_step_is_tried_in_several() -> None:
    core = Core("abcdef", bad="f")
    core.step()
    for _ in range(40):
        core.step(most_new=2)
    assert core.failed == ["f"]
