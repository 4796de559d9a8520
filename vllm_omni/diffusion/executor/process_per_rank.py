"""The executor of several ranks, each in a process of its own.

All ranks prepare and step; pictures are decoded by the last one, which has the fewest rows. A job
has ended when every rank that it was given to has said so, and then they have all said the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_omni.diffusion.executor.jobs import (
    Broken,
    Job,
    Lane,
    Prepare,
    Prepared,
    Result,
    Step,
    Stepped,
)
from vllm_omni.diffusion.executor.rank_wire import pack_drop, pack_job
from vllm_omni.generation.wire import RawFrame

logger = logging.getLogger(__name__)


class RankDiedError(RuntimeError):
    """The process of a rank ended; the replica cannot go on without it."""


class RanksDifferError(RuntimeError):
    """Ranks made different things of the same job, which they never should."""


class RankLink(Protocol):
    """The way to the processes of the ranks. Called from the engine's one thread, but `figures`."""

    num_ranks: int
    death: str | None
    """Why a rank is gone; it ends the replica."""

    def send(self, rank: int, message: list[RawFrame]) -> None:
        """In order, and without waiting. A rank that is gone shows in `death`."""

    def take(self) -> Sequence[tuple[int, Result]]:
        """What ranks have said since the last call, in order."""

    def figures(self) -> Mapping[str, float]:
        """Of the ranks, as of their last heartbeats; from another thread."""

    def close(self) -> None:
        """End the processes. Repeatable."""


@dataclass(slots=True)
class _Open:
    """A job that not every rank has answered yet."""

    job: Job
    missing: set[int]
    results: dict[int, Result] = field(default_factory=dict)


class ProcessPerRankExecutor:
    """See `Executor`."""

    def __init__(self, link: RankLink) -> None:
        self._link = link
        self._open: dict[Lane, _Open] = {}
        self._held: set[str] = set()
        """Requests of which ranks have something, or will have when they are prepared."""
        self._late: set[str] = set()
        """To be dropped when the running step has ended: a rank may not have begun it yet, and all
        must take it with the same members."""

    def __repr__(self) -> str:
        busy = ", ".join(sorted(self._open))
        return f"<ProcessPerRankExecutor ranks={self._link.num_ranks} busy=[{busy}]>"

    def submit(self, lane: Lane, job: Job) -> None:
        assert lane not in self._open, f"{lane} has a job"
        if isinstance(job, Prepare):
            self._held.add(job.request.request_id)
        every = range(self._link.num_ranks)
        ranks = every if isinstance(job, Prepare | Step) else every[-1:]
        self._open[lane] = _Open(job, set(ranks))
        message = pack_job(job)
        for rank in ranks:
            self._link.send(rank, message)

    def is_idle(self, lane: Lane) -> bool:
        return lane not in self._open

    def take_results(self) -> Sequence[Result]:
        taken: list[Result] = []
        for rank, result in self._link.take():
            lane = Lane.DENOISE if isinstance(result, Stepped) else Lane.MEDIA
            open_job = self._open[lane]
            open_job.results[rank] = result
            open_job.missing.discard(rank)
            if not open_job.missing:
                del self._open[lane]
                taken.append(merged([open_job.results[i] for i in sorted(open_job.results)]))
        if Lane.DENOISE not in self._open and self._late:
            late, self._late = self._late, set()
            self.drop(late)
        if self._link.death is not None:
            taken.append(Broken(RankDiedError(self._link.death)))
        return taken

    def drop(self, request_ids: Iterable[str]) -> None:
        """See `Executor`. One that is being prepared is dropped again when it is."""
        dropped = self._held.intersection(request_ids) - self._being_prepared()
        stepping = dropped & self._in_step()
        self._late |= stepping
        gone = sorted(dropped - stepping)
        if not gone:
            return
        self._held.difference_update(gone)
        message = pack_drop(gone)
        for rank in range(self._link.num_ranks):
            self._link.send(rank, message)

    def figures(self) -> Mapping[str, float]:
        return self._link.figures()

    def close(self) -> None:
        self._link.close()

    def _being_prepared(self) -> set[str]:
        open_job = self._open.get(Lane.MEDIA)
        if open_job is None or not isinstance(open_job.job, Prepare):
            return set()
        return {open_job.job.request.request_id}

    def _in_step(self) -> set[str]:
        open_job = self._open.get(Lane.DENOISE)
        if open_job is None or not isinstance(open_job.job, Step):
            return set()
        return set(open_job.job.request_ids)


def merged(results: Sequence[Result]) -> Result:
    """One result of those that the ranks gave to one job, in the order of ranks."""
    first = results[0]
    if isinstance(first, Prepared):
        return _merged_prepared([one for one in results if isinstance(one, Prepared)])
    failed = {frozenset(one.failures) for one in results if isinstance(one, Stepped)}
    if len(failed) > 1:
        return Broken(RanksDifferError(f"ranks disagree on who failed in a step: {results}"))
    return first


def _merged_prepared(results: Sequence[Prepared]) -> Result:
    """Each rank encodes by itself, so one alone may have failed; then the request has."""
    failed = next((one for one in results if one.failure is not None), None)
    if failed is not None:
        return failed
    if any(one != results[0] for one in results):
        return Broken(RanksDifferError(f"ranks prepared a request differently: {results}"))
    return results[0]
