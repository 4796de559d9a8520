"""Stands for torch.distributed between ranks that are threads of one process."""

from __future__ import annotations

import threading
from functools import partial

import torch

from vllm_omni.diffusion.distributed.exchange import Exchange


class Meeting:
    """Stands for torch.distributed: who comes waits until all have come."""

    def __init__(self, num_ranks: int) -> None:
        self.sent: list[torch.Tensor | None] = [None] * num_ranks
        self.num_transfers = 0
        self._barrier = threading.Barrier(num_ranks)

    def gather(self, rank: int, received: torch.Tensor, sent: torch.Tensor) -> None:
        try:
            self.sent[rank] = sent
            self.num_transfers += rank == 0
            self._barrier.wait(10)
            for one, other in zip(received, self.sent, strict=True):
                assert other is not None
                one.copy_(other)
            self._barrier.wait(10)
        except threading.BrokenBarrierError as error:
            raise RuntimeError("connection reset by peer") from error

    def leave(self) -> None:
        self._barrier.abort()


class Meetings:
    """Both ways that ranks meet."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.on_host = Meeting(num_ranks)
        self.on_device = Meeting(num_ranks)

    def exchange(self, rank: int) -> Exchange:
        return Exchange(
            rank,
            self.num_ranks,
            "cpu",
            on_host=partial(self.on_host.gather, rank),
            on_device=partial(self.on_device.gather, rank),
        )

    def leave(self) -> None:
        """Somebody will not come any more."""
        self.on_host.leave()
        self.on_device.leave()
