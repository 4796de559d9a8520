"""The runner of a pipeline without steps: one request from beginning to end."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from vllm_omni.diffusion.executor.jobs import Job, Made, Progressed, Result, Run
from vllm_omni.diffusion.models.interface import RequestPipeline
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.worker.attachments import Attachments
from vllm_omni.diffusion.worker.device import Device
from vllm_omni.diffusion.worker.model_runner import ModelRunner, Report
from vllm_omni.diffusion.worker.pixels import checked_pixels
from vllm_omni.diffusion.worker.self_test import self_test_request


class WholeRunner(ModelRunner):
    """Runs one request at a time."""

    def __init__(
        self, stage: str, pipeline: RequestPipeline, device: Device, attachments: Attachments
    ) -> None:
        super().__init__(stage, device, attachments)
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._running: str | None = None
        self._is_stopped = False
        """The running request was dropped."""
        self._num_runs = 0

    def __repr__(self) -> str:
        return f"<WholeRunner {self._stage} running={self._running}>"

    def figures(self) -> Mapping[str, float]:
        return {"num_forwards": self._num_runs}

    def drop(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            if self._running is not None and self._running in set(request_ids):
                self._is_stopped = True

    def _run(self, job: Job, report: Report) -> Result:
        assert isinstance(job, Run), "this pipeline has no steps"
        with self._lock:
            self._running, self._is_stopped = job.request.request_id, False
        try:
            return self._run_whole(job.request, report)
        finally:
            with self._lock:
                self._running = None

    def _run_whole(self, request: DiffusionRequest, report: Report) -> Made:
        request_id = request.request_id

        def goes_on(step: int, num_steps: int) -> bool:
            report(Progressed(request_id, step, num_steps))
            return not self._is_stopped

        try:
            self._attachments.before_run(request)
            pixels = self._retried(lambda: self._pipeline.run(request, goes_on), tiled=True)
            self._num_runs += 1
            return Made(request_id, checked_pixels(pixels) if pixels is not None else None)
        except Exception as error:  # noqa: BLE001 - the boundary of one request
            return Made(request_id, failure=self._failure(request_id, error))

    def _self_test(self) -> None:
        request = self_test_request(self._pipeline.capabilities)
        checked_pixels(self._pipeline.run(request, lambda step, num_steps: True))
