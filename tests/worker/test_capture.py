"""Rows beside the KV cache, by slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_omni.config.pipeline import LAST_HIDDEN, CaptureScope
from vllm_omni.worker.capture import StateCapture, spans_of

CPU = torch.device("cpu")


def capture(*layers: int, dtype: torch.dtype = torch.float32) -> StateCapture:
    made = StateCapture(layers, CaptureScope.ALL)
    made.allocate(num_blocks=8, block_size=4, width=1, dtype=dtype, device=CPU)
    return made


def slots(made: StateCapture, block_ids: list[int], spans: list[list[int]]) -> torch.Tensor:
    return torch.from_numpy(made.slots(block_ids, spans))


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(1)


@pytest.mark.parametrize(
    ("positions", "spans"),
    [([], []), ([3], [[3, 1]]), ([0, 1, 2, 7, 8, 20], [[0, 3], [7, 2], [20, 1]])],
)
def test_spans(positions: list[int], spans: list[list[int]]) -> None:
    assert spans_of(positions) == spans


def test_chunks_of_a_prompt_are_read_as_a_whole() -> None:
    rows = capture(LAST_HIDDEN)
    blocks = [5, 2]
    rows.keep(column(10, 11, 12), None, torch.tensor([20, 21, 22]))
    rows.keep(column(13, 14, 99), None, torch.tensor([23, 8]))  # a padded row at the end

    spans = [[0, 2], [3, 2]]
    ((found,),) = rows.read(slots(rows, blocks, spans), [spans])

    assert found.rows.flatten().tolist() == [10, 11, 13, 14]
    payload = found.payload()
    assert payload.meta == {
        "kind": "rows",
        "layer": 0,
        "spans": [[0, 2], [3, 2]],
        "dtype": "float32",
        "width": 1,
    }


def test_rows_of_cached_blocks_are_still_there_for_another_request() -> None:
    rows = capture(2)
    rows.keep(column(0), [column(1, 2, 3, 4)], torch.tensor([4, 5, 6, 7]))
    rows.keep(column(0), [column(5)], torch.tensor([12]))

    ((found,),) = rows.read(slots(rows, [1, 3], [[0, 5]]), [[[0, 5]]])

    assert found.rows.flatten().tolist() == [1, 2, 3, 4, 5]


def test_layers_are_told_apart_whatever_their_order() -> None:
    rows = capture(LAST_HIDDEN, 3, 0)
    assert rows.aux_layers == (0, 3)
    rows.keep(column(100), [column(1), column(30)], torch.tensor([0]))

    (found,) = rows.read(torch.tensor([0]), [[[0, 1]]])

    assert [one.rows.item() for one in found] == [100, 30, 1]


def test_half_precision_travels_as_its_bits() -> None:
    rows = capture(LAST_HIDDEN, dtype=torch.bfloat16)
    rows.keep(column(1.5), None, torch.tensor([0]))
    ((found,),) = rows.read(torch.tensor([0]), [[[0, 1]]])

    payload = found.payload()

    assert payload.meta["dtype"] == "bfloat16"
    assert payload.data.dtype == np.uint16
    assert torch.from_numpy(payload.data).view(torch.bfloat16).item() == 1.5


def test_memory_beside_the_cache_is_known_before_it_is_taken() -> None:
    assert capture(LAST_HIDDEN, 3).row_bytes(2048, torch.bfloat16) == 2 * 2048 * 2


def test_rows_of_several_requests_are_one_copy_and_are_told_apart() -> None:
    rows = capture(LAST_HIDDEN)
    rows.keep(column(1, 2, 3, 4), None, torch.tensor([4, 5, 12, 20]))
    spans = [[[0, 2]], [], [[7, 1], [9, 1]]]

    found = rows.read(torch.tensor([4, 5, 12, 20]), spans)

    assert [[one.rows.flatten().tolist() for one in of_one] for of_one in found] == [
        [[1, 2]],
        [],
        [[3, 4]],
    ]
    assert rows.read(torch.tensor([]), []) == []
