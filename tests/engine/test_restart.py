"""The restart budget and the states of a replica, without loop or process."""

from __future__ import annotations

import pytest

from tests.generation.replicas import tone_spec
from vllm_omni.config.deploy import ServerLimits, StageDeploy
from vllm_omni.engine.replica_state import Replica, ReplicaState
from vllm_omni.engine.restart import RestartBudget, RestartPolicy


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_three_restarts_within_the_period_and_no_fourth(clock: Clock) -> None:
    budget = RestartBudget(RestartPolicy(), clock)
    assert [budget.next_delay_s() for _ in range(5)] == [1.0, 2.0, 4.0, None, None]
    assert repr(budget) == "<RestartBudget 3 of 3>"


def test_the_back_off_doubles_up_to_its_limit(clock: Clock) -> None:
    budget = RestartBudget(RestartPolicy(max_restarts=9), clock)
    delays = [budget.next_delay_s() for _ in range(9)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_restarts_that_lie_behind_the_period_do_not_count(clock: Clock) -> None:
    budget = RestartBudget(RestartPolicy(), clock)
    first = [budget.next_delay_s() for _ in range(3)]
    clock.now_s += 300.0
    assert budget.next_delay_s() is None, "the period includes its end"
    clock.now_s += 0.1
    assert [*first, budget.next_delay_s()] == [1.0, 2.0, 4.0, 1.0]


def test_a_budget_of_none_never_restarts(clock: Clock) -> None:
    assert RestartBudget(RestartPolicy(max_restarts=0), clock).next_delay_s() is None


def test_an_operator_refills_it(clock: Clock) -> None:
    budget = RestartBudget(RestartPolicy(), clock)
    for _ in range(3):
        budget.next_delay_s()
    budget.refill()
    assert budget.next_delay_s() == 1.0


def test_the_policy_comes_from_the_configuration() -> None:
    deploy = StageDeploy(
        max_restarts=5,
        restart_period_s=6.0,
        restart_backoff_s=7.0,
        max_restart_backoff_s=8.0,
        stall_timeout_s=9.0,
    )
    policy = RestartPolicy.of(deploy, ServerLimits(replica_drain_timeout_s=10.0))
    assert policy == RestartPolicy(
        max_restarts=5,
        period_s=6.0,
        first_backoff_s=7.0,
        max_backoff_s=8.0,
        stall_timeout_s=9.0,
        drain_timeout_s=10.0,
    )
    assert RestartPolicy.of(StageDeploy(), ServerLimits()) == RestartPolicy()


STARTING, READY, DRAINING, BACKOFF, STOPPED = ReplicaState
WAYS = {
    STARTING: [],
    READY: [READY],
    DRAINING: [READY, DRAINING],
    BACKOFF: [BACKOFF],
    STOPPED: [STOPPED],
}
"""How a replica that is starting gets into each state."""
ALLOWED = {
    STARTING: {READY, BACKOFF, STOPPED},
    READY: {DRAINING, BACKOFF, STOPPED},
    DRAINING: {STARTING, STOPPED},
    BACKOFF: {STARTING, STOPPED},
    STOPPED: {STARTING},
}


def starting(clock: Clock, seen: list[ReplicaState] | None = None) -> Replica:
    changes = seen if seen is not None else []
    budget = RestartBudget(RestartPolicy(), clock)
    replica = Replica(tone_spec(), budget, clock, lambda one: changes.append(one.state))
    replica.become(STARTING)
    return replica


@pytest.mark.parametrize("before", list(ReplicaState))
@pytest.mark.parametrize("after", list(ReplicaState))
def test_a_replica_changes_only_as_the_table_says(
    before: ReplicaState, after: ReplicaState, clock: Clock
) -> None:
    seen: list[ReplicaState] = []
    replica = starting(clock, seen)
    for state in WAYS[before]:
        replica.become(state)
    if after in ALLOWED[before]:
        replica.become(after)
        assert (replica.state, seen[-1]) == (after, after)
    else:
        with pytest.raises(ValueError, match=f"cannot become {after}"):
            replica.become(after)
        assert (replica.state, seen[-1]) == (before, before)


def test_the_repr_tells_the_whole_story(clock: Clock) -> None:
    replica = starting(clock)
    replica.become(READY)
    assert repr(replica) == "<Replica voice/0 ready restarts=0>"
    replica.last_error = "killed"
    replica.become(BACKOFF, next_attempt_s=clock() + 2)
    assert repr(replica) == "<Replica voice/0 backoff restarts=0 (killed)>"


def test_its_status_says_when_it_is_tried_again(clock: Clock) -> None:
    replica = starting(clock)
    replica.become(BACKOFF, next_attempt_s=clock() + 2)
    clock.now_s += 0.5
    assert replica.status().next_attempt_in_s == 1.5
    clock.now_s += 5
    assert replica.status().next_attempt_in_s == 0.0
    replica.become(STARTING)
    assert replica.status().next_attempt_in_s is None
    assert replica.next_spec().incarnation_name == "voice/0.2"


@pytest.mark.parametrize(
    ("state", "expected_in_s"),
    [(STARTING, 8.0), (READY, 0.0), (DRAINING, None), (BACKOFF, 10.0), (STOPPED, None)],
)
def test_when_it_is_expected_to_serve(
    state: ReplicaState, expected_in_s: float | None, clock: Clock
) -> None:
    replica = starting(clock)
    replica.start_took_s = 8.0
    for step in WAYS[state]:
        replica.become(step, next_attempt_s=clock() + 2 if step is BACKOFF else None)
    expected_s = replica.expected_s()
    assert (None if expected_s is None else expected_s - clock()) == expected_in_s
