"""The scheduler's decisions, as plain functions."""

from __future__ import annotations

from vllm_omni.diffusion.sched.decisions import (
    Item,
    MediaState,
    MediaWork,
    Phase,
    next_batch,
    next_media_work,
    wants_preview,
)
from vllm_omni.diffusion.sched.table import ItemTable


def item(arrival: int, key: str = "k", **fields: object) -> Item:
    return Item(f"r{arrival}", arrival, key=key, **fields)  # type: ignore[arg-type]


def names(items: list[Item]) -> list[str]:
    return [one.request_id for one in items]


def test_the_first_to_come_step_together() -> None:
    assert names(next_batch([item(2), item(0), item(1)], {}, 2)) == ["r0", "r1"]


def test_only_equal_keys_share_a_forward() -> None:
    runnable = [item(0, "small"), item(1, "big"), item(2, "small")]

    assert names(next_batch(runnable, {}, 8)) == ["r0", "r2"]


def test_the_group_that_waited_longest_is_next() -> None:
    runnable = [item(0, "small"), item(1, "big"), item(2, "wide")]

    assert names(next_batch(runnable, {"small": 3, "big": 1, "wide": 2}, 8)) == ["r1"]
    assert names(next_batch(runnable, {"small": 3, "big": 1}, 8)) == ["r2"]


def test_nothing_runnable_is_no_batch() -> None:
    assert next_batch([], {"old": 1}, 8) == []


def media(**fields: object) -> MediaState:
    values = {"next_waiting": None, "num_prepared": 0, "num_steppable": 0, **fields}
    return MediaState(**values)  # type: ignore[arg-type]


def test_who_waits_is_prepared_while_the_batch_has_room() -> None:
    state = media(
        next_waiting=item(9), num_prepared=3, num_steppable=2, denoised=[item(0)], preview=item(1)
    )

    assert next_media_work(state, 4, 8) == (MediaWork.PREPARE, state.next_waiting)


def test_a_full_batch_lets_decoding_go_first() -> None:
    first, second = item(0), item(1)
    state = media(next_waiting=item(9), num_prepared=5, num_steppable=4, denoised=[second, first])

    assert next_media_work(state, 4, 8) == (MediaWork.DECODE, first)


def test_nobody_is_prepared_beyond_the_bound() -> None:
    state = media(next_waiting=item(9), num_prepared=8, num_steppable=2)

    assert next_media_work(state, 4, 8) is None


def test_a_preview_comes_before_preparing_ahead() -> None:
    state = media(next_waiting=item(9), num_prepared=4, num_steppable=4, preview=item(1))

    assert next_media_work(state, 4, 8) == (MediaWork.PREVIEW, state.preview)


def test_a_preview_is_due_after_its_interval_and_never_at_the_end() -> None:
    assert not wants_preview(item(0, step=3, num_steps=9))
    assert not wants_preview(item(0, step=2, num_steps=9, preview_interval=3))
    assert wants_preview(item(0, step=3, num_steps=9, preview_interval=3))
    assert not wants_preview(item(0, step=5, num_steps=9, preview_interval=3, preview_step=3))
    assert not wants_preview(item(0, step=9, num_steps=9, preview_interval=3))


def test_a_table_forgets_what_is_over() -> None:
    table = ItemTable(max_batch_size=2, max_prepared=2)
    table.add("a")
    table.add("b")
    begun = table.next_waiting()
    assert begun is not None
    table.begin(begun, Phase.RUNNABLE)
    assert repr(table) == "<ItemTable waiting=1 [a:runnable]>"

    table.remove("a")
    table.remove("b")

    assert (len(table), "a" in table, table.next_waiting()) == (0, False, None)


def test_turns_of_keys_that_are_gone_are_forgotten() -> None:
    table = ItemTable(max_batch_size=1, max_prepared=2)
    table.add("stays")
    stays = table.next_waiting()
    assert stays is not None
    table.begin(stays, Phase.RUNNABLE)
    for i in range(50):
        table.add(f"r{i}")
        one = table.next_waiting()
        assert one is not None
        table.begin(one, Phase.RUNNABLE)
        one.key = f"size {i}"
        table.take_batch()
        table.remove(one.request_id)
        stays.phase = Phase.RUNNABLE

    assert len(table._last_turn) <= 5
