from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.fakes import settle
from vllm_omni.engine.deadlines import Deadlines


class Clock:
    """Time that passes when a test says so; due timers are fired by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Watched:
    def __init__(self) -> None:
        self.clock = Clock()
        self.expired: list[str] = []
        self.deadlines = Deadlines(self._on_expired, self.clock)

    def _on_expired(self, request_ids: Sequence[str]) -> None:
        self.expired.extend(request_ids)

    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.deadlines._fire()


async def test_requests_expire_in_the_order_of_their_deadlines() -> None:
    watched = Watched()
    watched.deadlines.add("late", 103.0)
    watched.deadlines.add("early", 101.0)
    watched.pass_time(1.0)
    assert watched.expired == ["early"]
    watched.pass_time(2.0)
    assert watched.expired == ["early", "late"]
    assert len(watched.deadlines) == 0
    watched.deadlines.close()


async def test_a_request_that_is_over_does_not_expire() -> None:
    watched = Watched()
    watched.deadlines.add("a", 101.0)
    watched.deadlines.discard("a")
    watched.pass_time(5.0)
    assert watched.expired == []
    assert watched.deadlines._timer is None, "an idle server keeps no timer"


async def test_an_id_that_is_used_again_keeps_its_own_deadline() -> None:
    watched = Watched()
    watched.deadlines.add("a", 101.0)
    watched.deadlines.discard("a")
    watched.deadlines.add("a", 109.0)
    watched.pass_time(5.0)
    assert watched.expired == []
    watched.pass_time(5.0)
    assert watched.expired == ["a"]


async def test_finished_requests_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deadlines, "_COMPACT_MIN", 8)
    watched = Watched()
    for i in range(1000):
        watched.deadlines.add(f"r{i}", 700.0)
        watched.deadlines.discard(f"r{i}")
    assert len(watched.deadlines._heap) <= 9
    watched.deadlines.close()


async def test_one_timer_fires_by_itself() -> None:
    fired: list[str] = []
    done = asyncio.Event()

    def on_expired(request_ids: Sequence[str]) -> None:
        fired.extend(request_ids)
        done.set()

    loop = asyncio.get_running_loop()
    deadlines = Deadlines(on_expired, loop.time)
    deadlines.add("later", loop.time() + 60.0)
    deadlines.add("now", loop.time() + 0.01)
    async with asyncio.timeout(5):
        await done.wait()
    await settle()
    assert fired == ["now"]
    deadlines.close()
