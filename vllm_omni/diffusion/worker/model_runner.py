"""Runs jobs on one rank: holds what is known of requests, calls the pipeline, keeps failures apart.

`run` is called from the two lanes' threads at once, never twice from one; `drop` from a third.
"""

from __future__ import annotations

import abc
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from vllm_omni.diffusion.distributed.ranks import OneRank, Ranks
from vllm_omni.diffusion.executor.jobs import Job, Made, Prepared, Result, Stepped
from vllm_omni.diffusion.worker.attachments import Attachments
from vllm_omni.diffusion.worker.device import Device
from vllm_omni.diffusion.worker.isolation import is_starved, without_frames
from vllm_omni.engine.messages import StageFailure
from vllm_omni.errors import OmniError
from vllm_omni.generation.memory_errors import free_memory
from vllm_omni.generation.request import failure_from

logger = logging.getLogger(__name__)

MAX_FAILED_IN_A_ROW: Final = 3
"""Jobs of one kind that failed, one after another, before the pipeline is put to the test again."""

Report = Callable[[Result], None]
T = TypeVar("T")


class ModelRunner(abc.ABC):
    """What both kinds of pipeline have in common."""

    def __init__(
        self, stage: str, device: Device, attachments: Attachments, ranks: Ranks | None = None
    ) -> None:
        self._stage = stage
        self._device = device
        self._attachments = attachments
        self._ranks = ranks or OneRank()
        self._failed_in_a_row: Counter[type[Result]] = Counter()

    @abc.abstractmethod
    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests; a whole run among them stops at its next step."""

    @abc.abstractmethod
    def figures(self) -> Mapping[str, float]:
        """For the heartbeat; called in its thread."""

    @abc.abstractmethod
    def _run(self, job: Job, report: Report) -> Result: ...

    @abc.abstractmethod
    def _self_test(self) -> None: ...

    def run(self, job: Job, report: Report) -> Result:
        """Do one job. What fails is in its result.

        Raises:
            Exception: jobs failed in a row and the pipeline does not pass its self-test.
        """
        with self._device.computing():
            result = self._run(job, report)
            self._check_pipeline(result)
        return result

    def self_test(self) -> None:
        """Make one small picture; raises when that does not work."""
        with self._device.computing():
            self._self_test()

    def _retried(self, work: Callable[[], T], *, tiled: bool = False) -> T:
        """Do it; once more after memory was given back, in tiles where that helps."""
        try:
            return work()
        except Exception as error:
            if not is_starved(error):
                raise
            without_frames(error)
        logger.warning("stage %s: no memory, trying once more", self._stage)
        self._give_memory_back()
        with self._attachments.tiling(enabled=tiled):
            return work()

    def _give_memory_back(self) -> None:
        free_memory()

    def _failure(self, request_id: str, error: Exception) -> StageFailure:
        failure = failure_from(error, self._stage)
        if not isinstance(error, OmniError):
            logger.error("stage %s: request %s failed", self._stage, request_id, exc_info=error)
        return failure

    def _check_pipeline(self, result: Result) -> None:
        """After failures in a row: is it the requests, or the pipeline?"""
        kind = type(result)
        if not _has_only_failed(result):
            self._failed_in_a_row[kind] = 0
            return
        self._failed_in_a_row[kind] += 1
        if self._failed_in_a_row[kind] >= MAX_FAILED_IN_A_ROW:
            self._failed_in_a_row[kind] = 0
            with self._ranks.apart():  # the others may be doing something else
                self._self_test()  # raises: the replica ends, its supervisor takes over


def _has_only_failed(result: Result) -> bool:
    match result:
        case Prepared(failure=failure) | Made(failure=failure):
            return failure is not None and failure.code == "request_failed"
        case Stepped(request_ids, failures):
            return 0 < len(request_ids) == len(failures)
    return False
