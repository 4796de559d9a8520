"""Graphs of a function by batch size. On a GPU they say what the function says."""

from __future__ import annotations

import pytest
import torch

from vllm_omni.platforms.graphs import BatchGraphs, batch_sizes


def doubled(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (2 * x + y,)


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_sizes(largest: int, sizes: list[int]) -> None:
    assert batch_sizes(largest) == sizes


def test_without_a_device_for_graphs_the_function_is_called() -> None:
    graphs = BatchGraphs(doubled)
    graphs.capture(4, lambda size: (torch.zeros(size, 1), torch.zeros(size, 1)))

    (result,) = graphs(torch.tensor([[1.0], [2.0]]), torch.tensor([[5.0], [6.0]]))

    assert result.tolist() == [[7.0], [10.0]]
    assert repr(graphs) == "<BatchGraphs []>"


@pytest.mark.gpu
def test_graphs_give_what_the_function_gives_for_every_size() -> None:
    graphs = BatchGraphs(doubled)
    graphs.capture(6, lambda size: tuple(torch.zeros(size, 3, device="cuda") for _ in range(2)))
    assert repr(graphs) == "<BatchGraphs [1, 2, 4, 6]>"

    for num in range(1, 9):
        x, y = torch.rand(num, 3, device="cuda"), torch.rand(num, 3, device="cuda")
        assert torch.equal(graphs(x, y)[0], doubled(x, y)[0])
