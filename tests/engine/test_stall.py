"""What heartbeats say: a replica that works, one that waits, and one that stands still."""

from __future__ import annotations

import pytest

from vllm_omni.engine.process_status import Heartbeat
from vllm_omni.engine.stall import StallWatch

TIMEOUT_S = 60.0
LOOK_S = 5.0


class Watched:
    """A replica that beats once a second, and is looked at every five."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.watch = StallWatch("voice/0", TIMEOUT_S, self.now_s)
        self.beat: Heartbeat | None = None

    def live(
        self, seconds: float, *, runnable: int = 0, progress_per_s: float = 0, beats: bool = True
    ) -> str | None:
        """Let time pass; the first verdict."""
        for _ in range(int(seconds / LOOK_S)):
            progress = self.beat.progress if self.beat is not None else 0
            self.now_s += LOOK_S
            if beats:
                self.beat = Heartbeat(self.now_s, progress + LOOK_S * progress_per_s, runnable)
            verdict = self.watch.look(self.beat, self.now_s)
            if verdict is not None:
                return verdict
        return None


@pytest.fixture
def replica() -> Watched:
    return Watched()


def test_an_idle_replica_may_be_idle_for_ever(replica: Watched) -> None:
    assert replica.live(10_000) is None


def test_a_replica_that_works_is_left_alone(replica: Watched) -> None:
    assert replica.live(10_000, runnable=8, progress_per_s=0.1) is None


def test_a_replica_with_runnable_work_and_no_progress_is_found(replica: Watched) -> None:
    assert replica.live(100, runnable=3, progress_per_s=5) is None
    began_s = replica.now_s
    verdict = replica.live(1000, runnable=3)
    assert verdict == "stage voice/0 made no progress for 65 s with 3 runnable requests"
    assert TIMEOUT_S <= replica.now_s - began_s <= TIMEOUT_S + 2 * LOOK_S


def test_parked_work_is_no_stall_and_what_follows_has_the_whole_time(replica: Watched) -> None:
    assert replica.live(50, runnable=3) is None
    assert replica.live(5, runnable=0) is None
    assert replica.live(55, runnable=3) is None
    assert replica.live(20, runnable=3) is not None


def test_a_single_step_of_progress_starts_the_time_anew(replica: Watched) -> None:
    assert replica.live(55, runnable=1) is None
    assert replica.live(5, runnable=1, progress_per_s=1) is None
    assert replica.live(55, runnable=1) is None


def test_a_replica_that_is_silent_is_found_also_when_it_is_idle(replica: Watched) -> None:
    assert replica.live(100) is None
    verdict = replica.live(1000, beats=False)
    assert verdict == "stage voice/0 gave no sign of life for 65 s"


def test_a_replica_that_never_beats_is_found(replica: Watched) -> None:
    assert replica.live(1000, beats=False) == "stage voice/0 gave no sign of life for 65 s"


def test_one_look_is_not_enough_since_the_watcher_may_have_stood_still(replica: Watched) -> None:
    assert replica.live(100, runnable=2, progress_per_s=1) is None
    replica.now_s += 10_000  # this process was stopped: the beats are there, but not read yet
    assert replica.watch.look(replica.beat, replica.now_s) is None
    assert replica.live(5, runnable=2, progress_per_s=1) is None
    assert replica.live(50, runnable=2, progress_per_s=1) is None
