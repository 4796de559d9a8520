"""What a pipeline and its runner ask of the ranks of their replica. No torch in here.

Every rank holds the whole pipeline and does the same jobs in the same order. In a denoise step
each computes its share of the rows and gets the others' from them; everything else each does
for itself, with the same result.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Compute = Callable[[Sequence[int]], Sequence["torch.Tensor"]]
"""From indices of rows to their predictions, each with batch dimension 1, all of one shape."""

RANK_ENV: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Variables of a rank's process, where the operator has not set them: no other host takes part."""


class Ranks(Protocol):
    """The ranks of a replica, as one of them sees them. The two methods that wait for the others
    are for the thread of the denoise steps alone."""

    rank: int
    """This one, from 0."""

    def share_rows(self, num_rows: int, compute: Compute) -> list[torch.Tensor]:
        """The predictions of all rows, of which this rank computes its share.

        Raises:
            Exception: on every rank, when one could not compute its share.
        """

    def all_or_none(self, work: Callable[[], T]) -> T:
        """Do what has no effect by itself; raises on every rank when it raised on one."""

    def step(self) -> AbstractContextManager[None]:
        """Around a denoise step: what raises on this rank alone, where the others do not hear of
        it, is the end of the replica."""

    def apart(self) -> AbstractContextManager[None]:
        """Meanwhile this thread does everything itself and waits for nobody."""


class OneRank:
    """A replica of one rank."""

    rank = 0

    def __repr__(self) -> str:
        return "<OneRank>"

    def share_rows(self, num_rows: int, compute: Compute) -> list[torch.Tensor]:
        return list(compute(range(num_rows)))

    def all_or_none(self, work: Callable[[], T]) -> T:
        return work()

    def step(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def apart(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


def shares(num_rows: int, num_ranks: int) -> list[range]:
    """The rows of each rank, in order; the first ones have one more where it does not come out
    even, and the last ones none where there are few."""
    each, more = divmod(num_rows, num_ranks)
    ends = [each * rank + min(rank, more) for rank in range(num_ranks + 1)]
    return [range(first, end) for first, end in itertools.pairwise(ends)]
