"""What ranks tell each other in a step: here each is a thread, and they meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.diffusion.distributed.meeting import Meetings
from vllm_omni.diffusion.distributed.exchange import Exchange, PeerFailedError, RanksLostError
from vllm_omni.diffusion.distributed.ranks import OneRank, shares
from vllm_omni.generation.memory_errors import is_out_of_memory

ROWS = torch.arange(60.0).reshape(5, 3, 4)


def run(num_ranks: int, work: Callable[[Exchange], Any]) -> list[Any]:
    """What each rank returns or raises."""
    meetings = Meetings(num_ranks)

    def one(rank: int) -> Any:
        exchange = meetings.exchange(rank)
        try:
            with exchange.step():
                return work(exchange)
        except BaseException as error:  # noqa: BLE001 - the thread's boundary
            if isinstance(error, RanksLostError):
                meetings.leave()
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, range(num_ranks)))


def rows_at(indices: Sequence[int]) -> list[torch.Tensor]:
    return [ROWS[i : i + 1] for i in indices]


@pytest.mark.parametrize(
    ("num_rows", "num_ranks", "sizes"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (1, 3, [1, 0, 0]), (7, 3, [3, 2, 2]), (2, 1, [2])],
)
def test_rows_are_shared_out_evenly_and_in_order(
    num_rows: int, num_ranks: int, sizes: list[int]
) -> None:
    parts = shares(num_rows, num_ranks)

    assert [len(part) for part in parts] == sizes
    assert [i for part in parts for i in part] == list(range(num_rows))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_every_rank_gets_every_row_and_computes_its_own(num_ranks: int, num_rows: int) -> None:
    computed: dict[int, list[int]] = {}

    def work(exchange: Exchange) -> list[torch.Tensor]:
        def compute(mine: Sequence[int]) -> list[torch.Tensor]:
            computed[exchange.rank] = list(mine)
            return rows_at(mine)

        return exchange.share_rows(num_rows, compute)

    for rows in run(num_ranks, work):
        assert torch.equal(torch.cat(rows), ROWS[:num_rows])
    expected = shares(num_rows, num_ranks)
    assert computed == {rank: list(part) for rank, part in enumerate(expected) if part}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_type_of_the_numbers_stays_what_it_is(dtype: torch.dtype) -> None:
    for rows in run(3, lambda one: one.share_rows(2, lambda i: [r.to(dtype) for r in rows_at(i)])):
        assert [row.dtype for row in rows] == [dtype] * 2
        assert torch.equal(torch.cat(rows), ROWS[:2].to(dtype))


def test_a_rank_without_memory_is_a_lack_of_memory_on_all() -> None:
    def work(exchange: Exchange) -> object:
        def compute(mine: Sequence[int]) -> list[torch.Tensor]:
            if exchange.rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return rows_at(mine)

        return exchange.all_or_none(lambda: exchange.share_rows(4, compute))

    errors = run(3, work)

    assert all(map(is_out_of_memory, errors)), errors
    assert "rank 1: OutOfMemoryError: CUDA out of memory. Tried" in str(errors[0])
    assert str(errors[1]).startswith("CUDA out of memory")


def test_what_one_cannot_do_for_another_reason_counts_more_than_memory() -> None:
    """All must take the same turn: here the batch runs one by one, not in halves."""

    def work(exchange: Exchange) -> object:
        def compute(mine: Sequence[int]) -> list[torch.Tensor]:
            if exchange.rank:
                raise (MemoryError("none"), ValueError("the CUDA is out of memory"))[
                    exchange.rank - 1
                ]
            return rows_at(mine)

        return exchange.share_rows(3, compute)

    errors = run(3, work)

    assert not any(map(is_out_of_memory, errors)), errors
    assert [type(error) for error in errors] == [PeerFailedError, PeerFailedError, ValueError]
    assert str(errors[0]) == "rank 2: ValueError: the CUDA is out of memory"


def test_who_has_no_rows_may_lack_memory_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, starved = torch.zeros, set[threading.Thread]()

    def zeros(*shape: Any, **options: Any) -> torch.Tensor:
        if threading.current_thread() in starved and len(shape) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(*shape, **options)

    def work(exchange: Exchange) -> object:
        if exchange.rank == 1:
            starved.add(threading.current_thread())
        return exchange.share_rows(1, rows_at)

    monkeypatch.setattr(torch, "zeros", zeros)
    errors = run(2, work)

    assert all(map(is_out_of_memory, errors)), errors


def test_all_or_none_raises_on_all_or_on_none() -> None:
    def fine(exchange: Exchange) -> int:
        return exchange.all_or_none(lambda: exchange.rank)

    def bad(exchange: Exchange) -> object:
        def work() -> None:
            if exchange.rank == 1:
                raise ValueError("cannot go on")

        return exchange.all_or_none(work)

    assert run(2, fine) == [0, 1]
    errors = run(2, bad)
    assert [type(error) for error in errors] == [PeerFailedError, ValueError]


def test_who_fails_where_the_others_do_not_hear_of_it_is_lost_and_so_are_they() -> None:
    def work(exchange: Exchange) -> object:
        if exchange.rank == 1:
            raise ValueError("before anything")
        return exchange.share_rows(2, rows_at)

    errors = run(2, work)

    assert [type(error) for error in errors] == [RanksLostError, RanksLostError]
    assert "rank 1 alone failed" in str(errors[1])
    assert "connection reset" in str(errors[0])


def test_ranks_at_different_places_do_not_go_on() -> None:
    def work(exchange: Exchange) -> object:
        if exchange.rank == 1:
            return exchange.all_or_none(lambda: None)
        return exchange.share_rows(2, rows_at)

    assert [type(error) for error in run(2, work)] == [RanksLostError, RanksLostError]


def test_rows_of_different_shapes_are_no_step() -> None:
    def work(exchange: Exchange) -> object:
        return exchange.share_rows(2, lambda mine: [torch.zeros(1, 2, 3 + exchange.rank)])

    assert [type(error) for error in run(2, work)] == [RanksLostError, RanksLostError]


def test_apart_a_rank_does_all_and_waits_for_nobody() -> None:
    def work(exchange: Exchange) -> torch.Tensor | None:
        if exchange.rank == 0:
            return None
        with exchange.apart():
            exchange.all_or_none(lambda: None)
            return torch.cat(exchange.share_rows(5, rows_at))

    _, rows = run(2, work)
    assert torch.equal(rows, ROWS)


def test_one_rank_is_the_plain_thing() -> None:
    one = OneRank()

    assert torch.equal(torch.cat(one.share_rows(5, rows_at)), ROWS)
    with one.step(), one.apart(), pytest.raises(ValueError, match="no"):
        one.all_or_none(lambda: int("no"))
