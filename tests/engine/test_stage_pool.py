from __future__ import annotations

import asyncio

import pytest

from tests.fakes import FakeStageClient, settle
from vllm_omni.config.pipeline import StageKind
from vllm_omni.engine.messages import StageRequest
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.errors import StageUnavailableError


def make_pool(num_replicas: int = 2, **kwargs: bool) -> tuple[StagePool, list[FakeStageClient]]:
    clients = [FakeStageClient(replica_id=i) for i in range(num_replicas)]
    return StagePool(1, "talker", StageKind.AUTOREGRESSIVE, clients, **kwargs), clients


def request(request_id: str) -> StageRequest:
    return StageRequest(request_id, 1, None, None)


def test_selection_takes_turns_from_replica_0() -> None:
    pool, _ = make_pool(3)
    assert [pool.select_replica_id() for _ in range(5)] == [0, 1, 2, 0, 1]


def test_the_replica_with_the_least_to_do_is_next_and_equals_take_turns() -> None:
    pool, _ = make_pool(3)
    assert [pool.select_replica_id(name) for name in "abc"] == [0, 1, 2]
    pool.note_finished("b")
    assert [pool.select_replica_id(name) for name in "de"] == [1, 2]
    pool.release("a")
    pool.release("a")
    pool.note_finished("a")
    assert [pool.select_replica_id(name) for name in "fghi"] == [0, 1, 0, 1]


async def test_more_input_of_a_session_is_work_again() -> None:
    pool, _ = make_pool()
    await pool.submit_initial(request("a"))
    pool.note_finished("a")
    await pool.submit_update(request("a"))
    await pool.submit_update(request("a"))
    assert [pool.select_replica_id(name) for name in "bc"] == [1, 0]


async def test_a_replica_that_died_and_came_back_is_not_buried_nor_shunned() -> None:
    pool, _ = make_pool()
    long, dead = [f"long{i}" for i in range(4)], []
    for i, name in enumerate(long):
        pool.select_replica_id(name)
        if pool.select_replica_id(f"short{i}") == 1:
            pool.note_finished(f"short{i}")
        dead += [name for name in (name, f"short{i}") if pool.get_bound_replica_id(name) == 1]
    pool.evict_replica(1)
    assert [pool.select_replica_id(f"survivor{i}") for i in range(2)] == [0, 0]
    for name in dead:
        pool.release(name)
    pool.attach_replica(1, FakeStageClient(replica_id=1))
    assert [pool.select_replica_id(f"new{i}") for i in range(3)] == [1, 1, 1]


def test_a_request_stays_on_its_replica() -> None:
    pool, _ = make_pool()
    assert [pool.select_replica_id("a") for _ in range(3)] == [0, 0, 0]
    assert pool.get_bound_replica_id("a") == 0
    assert pool.select_replica_id("b") == 1


def test_affinity_prefers_the_other_requests_replica() -> None:
    pool, _ = make_pool()
    pool.select_replica_id("parent")
    assert pool.preselect_replica_id("companion", affinity_request_id="parent") == 0


async def test_affinity_to_a_dead_replica_takes_the_next() -> None:
    pool, _ = make_pool()
    pool.select_replica_id("parent")
    pool.evict_replica(0)
    assert pool.select_replica_id("companion", affinity_request_id="parent") == 1


@pytest.mark.parametrize("replica_id", [-1, 2, 99])
def test_evicting_a_replica_that_is_not_there_is_refused(replica_id: int) -> None:
    pool, _ = make_pool()
    with pytest.raises(ValueError, match="out of range") as raised:
        pool.evict_replica(replica_id)
    assert str(raised.value) == (
        f"evict_replica: replica_id {replica_id} out of range (num_replicas=2)"
    )


async def test_eviction_leaves_a_hole_and_renumbers_nothing() -> None:
    pool, clients = make_pool(3)
    pool.evict_replica(1)
    await settle()
    assert pool.num_replicas == 3
    assert pool.live_num_replicas == 2
    assert pool.live_replica_ids() == [0, 2]
    assert [client.shutdown_calls for client in clients] == [0, 1, 0]
    assert repr(pool) == "<StagePool talker [0 live, 1 dead, 2 live] bound=0>"


async def test_evicting_twice_shuts_down_once() -> None:
    pool, clients = make_pool()
    pool.evict_replica(0)
    pool.evict_replica(0)
    await settle()
    assert clients[0].shutdown_calls == 1


async def test_kind_and_name_outlive_every_replica() -> None:
    pool, _ = make_pool(1)
    pool.evict_replica(0)
    assert (pool.stage_type, pool.name, pool.stage_client) == (
        StageKind.AUTOREGRESSIVE,
        "talker",
        None,
    )


async def test_selection_without_live_replicas_says_so() -> None:
    pool, _ = make_pool(1)
    pool.evict_replica(0)
    with pytest.raises(StageUnavailableError, match=r"^stage 1 has no live replicas$"):
        pool.select_replica_id("a")


def test_an_unavailable_replica_gets_no_new_requests_but_keeps_its_own() -> None:
    pool, _ = make_pool()
    pool.select_replica_id("old")
    pool.mark_replica_unavailable(0)
    assert pool.available_replica_ids() == [1]
    assert not pool.is_replica_available(0)
    assert [pool.select_replica_id() for _ in range(3)] == [1, 1, 1]
    assert pool.select_replica_id("old") == 0


async def test_a_request_of_a_dead_replica_is_placed_anew() -> None:
    pool, _ = make_pool()
    pool.select_replica_id("a")
    pool.evict_replica(0)
    assert pool.get_bound_replica_id("a") == 0, "the dead binding must be found until release"
    assert pool.select_replica_id("a") == 1


async def test_an_empty_slot_is_not_attached() -> None:
    pool, _ = make_pool(1)
    pool.select_replica_id("a")
    pool.evict_replica(0)
    with pytest.raises(StageUnavailableError, match=r"^stage 1 replica 0 is not attached$"):
        pool.client(0)
    with pytest.raises(StageUnavailableError, match=r"^stage 1 replica 0 is not attached$"):
        await pool.submit_update(request("a"))


async def test_submit_binds_and_returns_the_replica() -> None:
    pool, clients = make_pool()
    assert await pool.submit_initial(request("a")) == 0
    assert await pool.submit_initial(request("b")) == 1
    assert await pool.submit_update(request("b")) == 1
    assert (clients[0].added_ids, clients[1].added_ids) == (["a"], ["b"])
    assert [update.request_id for update in clients[1].updated] == ["b"]


async def test_aborts_go_to_the_replica_that_has_the_request() -> None:
    pool, clients = make_pool()
    for request_id in ("a", "b", "c"):
        await pool.submit_initial(request(request_id))
    await pool.abort_requests(["a", "b", "c", "unknown"])
    assert clients[0].abort_calls == [["a", "c"]]
    assert clients[1].abort_calls == [["b"]]


async def test_aborts_pass_over_dead_replicas() -> None:
    pool, clients = make_pool()
    await pool.submit_initial(request("a"))
    pool.evict_replica(0)
    await pool.abort_requests(["a"])
    assert clients[0].abort_calls == []


async def test_a_replica_can_be_attached_to_a_hole_only() -> None:
    pool, _ = make_pool()
    again = FakeStageClient(replica_id=0)
    with pytest.raises(ValueError, match="already attached"):
        pool.attach_replica(0, again)
    pool.evict_replica(0)
    pool.attach_replica(0, again)
    assert pool.live_replica_ids() == [0, 1]
    assert pool.client(0) is again


async def test_a_waiting_selection_is_woken_by_the_replica_that_comes_up() -> None:
    pool, _ = make_pool(1, distributed=True)
    pool.evict_replica(0)
    submitted = asyncio.create_task(pool.submit_initial(request("a")))
    await settle()
    assert not submitted.done()
    again = FakeStageClient()
    pool.attach_replica(0, again)
    assert await submitted == 0
    assert again.added_ids == ["a"]


async def test_a_waiting_selection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagePool, "DISPATCH_WAIT_TIMEOUT_S", 0.04)
    monkeypatch.setattr(StagePool, "DISPATCH_RETRY_INTERVAL_S", 0.01)
    pool, _ = make_pool(1)
    pool.evict_replica(0)
    with pytest.raises(StageUnavailableError, match=r"^no UP replica for stage 1 after 0\.0s$"):
        await pool.wait_for_replica_id("a")


async def test_a_client_that_fails_to_shut_down_does_not_keep_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool, clients = make_pool()

    async def fail(timeout_s: float) -> None:
        raise RuntimeError("stuck")

    clients[0].shutdown_async = fail  # type: ignore[method-assign]
    await pool.close(1.0)
    assert clients[1].shutdown_calls == 1
    assert pool.live_num_replicas == 0
    assert "could not be shut down" in caplog.text
