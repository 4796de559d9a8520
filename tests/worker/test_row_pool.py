"""Rows by request and position in one tensor."""

from __future__ import annotations

import torch

from vllm_omni.worker.row_pool import PAGE_ROWS, RowPool, RowSequence

CPU = torch.device("cpu")


def pool(num_pages: int = 2) -> RowPool:
    return RowPool(1, torch.float32, CPU, num_pages)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(1)


def append(pool: RowPool, sequence: RowSequence, rows: torch.Tensor) -> None:
    pool.write(pool.extend(sequence, rows.shape[0]), rows)


def test_rows_come_back_by_position_across_pages() -> None:
    rows, one, other = pool(), RowSequence(), RowSequence()
    append(rows, one, column(*range(PAGE_ROWS - 1)))
    append(rows, other, column(-1.0))
    append(rows, one, column(500.0, 501.0, 502.0))

    found = rows.read(rows.indices(one, PAGE_ROWS - 2, 4))

    assert found.flatten().tolist() == [PAGE_ROWS - 2, 500.0, 501.0, 502.0]
    assert rows.read(rows.indices(other, 0, 1)).item() == -1.0


def test_a_full_pool_grows_and_keeps_what_it_has() -> None:
    rows, one = pool(1), RowSequence()
    append(rows, one, column(*range(5 * PAGE_ROWS)))

    assert rows.read(rows.indices(one, 0, 5 * PAGE_ROWS)).flatten().tolist() == list(
        range(5 * PAGE_ROWS)
    )
    assert len(set(one.pages)) == 5


def test_what_is_given_back_is_used_again() -> None:
    rows = pool(4)
    for _ in range(100):
        one, other = RowSequence(), RowSequence()
        append(rows, one, column(*range(PAGE_ROWS + 1)))
        append(rows, other, column(1.0))
        rows.release(one)
        rows.release(other)

    assert repr(rows) == "<RowPool pages=4 free=4>"


def test_writing_a_position_again_is_harmless() -> None:
    rows, one = pool(), RowSequence()
    append(rows, one, column(1.0, 2.0))
    rows.write(rows.indices(one, 1, 1), column(2.0))

    assert rows.read(rows.indices(one, 0, 2)).flatten().tolist() == [1.0, 2.0]
    assert one.length == 2
