"""Rows of what layers remember."""

import torch

from vllm_omni.model_executor.models.common.state_table import FIRST_CAPACITY, StateTable


def table() -> StateTable:
    return StateTable([(2,), (3, 1)], torch.float32, torch.device("cpu"))


def test_rows_give_back_what_was_written() -> None:
    states = table()
    rows = [states.allocate() for _ in range(3)]
    first, second = torch.arange(6.0).reshape(3, 2), torch.arange(9.0).reshape(3, 3, 1)

    states.write(rows, [first, second])

    read = states.read(rows[::-1])
    assert torch.equal(read[0], first.flip(0))
    assert torch.equal(read[1], second.flip(0))


def test_it_grows_and_keeps_what_it_has() -> None:
    states = table()
    row = states.allocate()
    states.write([row], [torch.ones(1, 2), torch.ones(1, 3, 1)])

    rows = [states.allocate() for _ in range(FIRST_CAPACITY)]

    assert len({row, *rows}) == FIRST_CAPACITY + 1
    assert torch.equal(states.read([row])[0], torch.ones(1, 2))
    assert states.capacity == 2 * FIRST_CAPACITY


def test_a_freed_row_is_used_again() -> None:
    states = table()
    for _ in range(3 * FIRST_CAPACITY):
        states.free(states.allocate())
    assert repr(states) == f"<StateTable 0 of {FIRST_CAPACITY} rows>"
