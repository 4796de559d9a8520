"""Functions of tensors, replayed as graphs of the device for batches up to a size.

For what runs between two steps of an engine and is nothing but many small kernels. The function may
not look at a value, draw a random number or allocate what outlives it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: Any
    inputs: Tensors
    outputs: Tensors


class BatchGraphs:
    """Calls a function whose arguments and results all have the batch as first axis.

    Before `capture`, and for batches beyond what was captured, it is called as it is.
    """

    def __init__(self, function: Callable[..., Tensors]) -> None:
        self._function = function
        self._graphs: dict[int, _Graph] = {}

    def __repr__(self) -> str:
        return f"<BatchGraphs {sorted(self._graphs)}>"

    def capture(self, max_batch: int, example: Callable[[int], Tensors]) -> None:
        """Record the function for batches up to `max_batch`; nothing where there are no graphs.

        Args:
            example: arguments for a batch of a size.
        """
        sizes = batch_sizes(max_batch)
        if example(1)[0].device.type != "cuda":
            return
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(sizes):  # the largest first: the others find room in its memory
            inputs = example(size)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._function(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outputs = self._function(*inputs)
            self._graphs[size] = _Graph(graph, inputs, outputs)

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """The results; those of a graph are valid until the next call."""
        num = inputs[0].shape[0]
        size = min((size for size in self._graphs if size >= num), default=None)
        if size is None:
            return self._function(*inputs)
        found = self._graphs[size]
        for static, given in zip(found.inputs, inputs, strict=True):
            static[:num].copy_(given, non_blocking=True)
        found.graph.replay()
        return tuple(output[:num] for output in found.outputs)


def batch_sizes(max_batch: int) -> list[int]:
    """Sizes to record: each batch is padded to the next."""
    small = [size for size in (1, 2, 4) if size < max_batch]
    return [*small, *range(8, max_batch, 8), max_batch]
