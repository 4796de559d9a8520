"""The seam between the engine and the ranks of a replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from vllm_omni.diffusion.executor.jobs import Job, Lane, Result


class Executor(Protocol):
    """Runs jobs on every rank. Called from the engine's one thread; results wake it."""

    def submit(self, lane: Lane, job: Job) -> None:
        """Begin a job; the lane must be idle."""

    def is_idle(self, lane: Lane) -> bool:
        """The lane's last job has ended and its result was taken."""

    def take_results(self) -> Sequence[Result]:
        """What has come since the last call, in order."""

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests; a whole run among them stops at its next step."""

    def figures(self) -> Mapping[str, float]:
        """Of the ranks, for the heartbeat; called in another thread."""

    def close(self) -> None:
        """Stop after the running jobs. Repeatable."""
