"""The suite's own judgement: what it must call a fault."""

from __future__ import annotations

import aiohttp
import pytest

from benchmarks.load_client import Outcome
from tests.dfx.reliability.harness import (
    _assert_server_alive_after_fault,
    _looks_like_server_unreachable,
    assert_ended_in_time,
    until,
)
from tests.dfx.reliability.orders import Fault, Order, order_in, seed_for


async def test_a_server_that_is_gone_is_said_to_have_exited(unused_tcp_port: int) -> None:
    with pytest.raises(pytest.fail.Exception, match="out of memory: the server exited"):
        await _assert_server_alive_after_fault(
            "127.0.0.1", unused_tcp_port, scenario="out of memory"
        )


def test_what_looks_unreachable() -> None:
    assert _looks_like_server_unreachable(aiohttp.ServerDisconnectedError())
    assert _looks_like_server_unreachable(ConnectionRefusedError())
    assert not _looks_like_server_unreachable(TimeoutError())
    assert not _looks_like_server_unreachable(ValueError())


def test_a_request_older_than_its_deadline_is_a_fault() -> None:
    assert_ended_in_time([Outcome("chat", started_s=0.0, ended_s=12.5)], 12.0)
    with pytest.raises(AssertionError, match="older than the deadline"):
        assert_ended_in_time([Outcome("chat", started_s=0.0, ended_s=13.5)], 12.0)


async def test_what_never_holds_fails_with_its_name() -> None:
    with pytest.raises(pytest.fail.Exception, match="the moon: not within"):
        await until(lambda: False, 0.02, "the moon")


def test_the_longest_gap_is_within_its_window() -> None:
    stream = Outcome("chat", started_s=0.0, chunk_times_s=[1.0, 1.5, 3.0, 3.25])

    assert stream.longest_gap_s(1.2, 3.1) == pytest.approx(1.5)
    assert stream.longest_gap_s(3.0, 3.25) == pytest.approx(0.25)
    assert stream.longest_gap_s(4.0, 6.0) == pytest.approx(2.0)


def test_orders_travel_as_seeds() -> None:
    assert order_in(seed_for(Fault.HANG, 2000)) == Order(Fault.HANG, 2000)
    assert order_in(1) is None
    assert order_in(None) is None
