"""The executor of one rank in the process it is called in: a thread for each lane.

The engine's thread stays free, so commands, aborts and deadlines are taken while a forward runs.
Both lanes put their kernels on the device's one stream: what encodes or decodes is woven between
denoise steps kernel by kernel, nothing of one lane reads what the other has not finished writing,
and memory that one frees is safe to give to the other.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from vllm_omni.diffusion.executor.jobs import Broken, Job, Lane, Progressed, Result
from vllm_omni.diffusion.worker.model_runner import ModelRunner

_JOIN_S: Final = 1.0
"""Longest wait for a running job at the end; the process takes it along."""


class InProcessExecutor:
    """See `Executor`."""

    def __init__(self, runner: ModelRunner, wake: Callable[[], None]) -> None:
        self._runner = runner
        self._wake = wake
        self._results: deque[tuple[Lane, Result]] = deque()
        """At most one for each lane, and the progress of one run."""
        self._busy: set[Lane] = set()
        self._jobs: dict[Lane, queue.Queue[Job | None]] = {}
        self._threads: list[threading.Thread] = []
        for lane in Lane:
            self._jobs[lane] = queue.Queue(maxsize=2)
            thread = threading.Thread(
                target=self._work, args=(lane, self._jobs[lane]), name=f"{lane}-lane", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def __repr__(self) -> str:
        return f"<InProcessExecutor busy=[{', '.join(sorted(self._busy))}]>"

    def submit(self, lane: Lane, job: Job) -> None:
        assert lane not in self._busy, f"{lane} has a job"
        self._busy.add(lane)
        self._jobs[lane].put(job)

    def is_idle(self, lane: Lane) -> bool:
        return lane not in self._busy

    def take_results(self) -> Sequence[Result]:
        taken: list[Result] = []
        while self._results:
            lane, result = self._results.popleft()
            if not isinstance(result, Progressed):
                self._busy.discard(lane)
            taken.append(result)
        return taken

    def drop(self, request_ids: Iterable[str]) -> None:
        self._runner.drop(request_ids)

    def figures(self) -> Mapping[str, float]:
        return self._runner.figures()

    def close(self) -> None:
        for jobs in self._jobs.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _work(self, lane: Lane, jobs: queue.Queue[Job | None]) -> None:
        def report(result: Result) -> None:
            self._report(lane, result)

        while (job := jobs.get()) is not None:
            try:
                result = self._runner.run(job, report)
            except BaseException as error:  # noqa: BLE001 - a thread's boundary: the replica ends
                result = Broken(error)
            self._report(lane, result)

    def _report(self, lane: Lane, result: Result) -> None:
        self._results.append((lane, result))
        self._wake()
