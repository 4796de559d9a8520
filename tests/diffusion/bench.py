"""A diffusion engine on a pipeline without a model, with time that only passes in forwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.diffusion.stripes import StripePipeline, WholePipeline
from vllm_omni.config.diffusion_options import DiffusionEngineArgs
from vllm_omni.diffusion.engine import DiffusionEngine
from vllm_omni.diffusion.executor.jobs import Broken, Job, Lane, Result
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.sched.table import ItemTable
from vllm_omni.diffusion.worker.attachments import Attachments
from vllm_omni.diffusion.worker.device import Device
from vllm_omni.diffusion.worker.model_runner import ModelRunner
from vllm_omni.diffusion.worker.step_runner import StepRunner
from vllm_omni.diffusion.worker.whole_runner import WholeRunner
from vllm_omni.engine.messages import StageOutput

STEP_S = 1.0
"""What a forward costs, whatever its size."""


def request(request_id: str, prompt: str | None = None, **fields: Any) -> DiffusionRequest:
    values = {"seed": 0, "num_inference_steps": 4, "height": 32, "width": 32, **fields}
    return DiffusionRequest(request_id=request_id, prompt=prompt or request_id, **values)


class TurnExecutor:
    """Runs a lane's job when the test says so: at the beginning of the next `turn`."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.jobs: dict[Lane, Job] = {}
        self.log: list[Job] = []
        self.hanging: set[Lane] = set()
        """Lanes whose job does not end."""
        self._results: deque[Result] = deque()
        self._busy: set[Lane] = set()
        self._done: set[Lane] = set()

    def submit(self, lane: Lane, job: Job) -> None:
        assert lane not in self._busy
        self._busy.add(lane)
        self.jobs[lane] = job
        self.log.append(job)

    def is_idle(self, lane: Lane) -> bool:
        return lane not in self._busy

    def turn(self) -> None:
        for lane in [lane for lane in self.jobs if lane not in self.hanging]:
            job = self.jobs.pop(lane)
            self._done.add(lane)
            try:
                self._results.append(self.runner.run(job, self._results.append))
            except Exception as error:  # noqa: BLE001 - as the executor
                self._results.append(Broken(error))

    def take_results(self) -> Sequence[Result]:
        taken = list(self._results)
        self._results.clear()
        self._busy -= self._done
        self._done.clear()
        return taken

    def drop(self, request_ids: Iterable[str]) -> None:
        self.runner.drop(request_ids)

    def figures(self) -> Mapping[str, float]:
        return self.runner.figures()

    def close(self) -> None:
        pass


class Bench:
    """An engine with its surroundings, and what each request has got so far."""

    def __init__(
        self,
        pipeline: StripePipeline | WholePipeline | None = None,
        *,
        max_batch_size: int = 4,
        max_prepared: int = 8,
        cache_bytes: int = 1024,
    ) -> None:
        self.pipeline: Any = pipeline or StripePipeline()
        self.now = 0.0
        self.pipeline.on_step = self._pass_time
        device = Device("cpu")
        attachments = Attachments(
            self.pipeline.components, self.pipeline.capabilities, DiffusionEngineArgs(), "cpu"
        )
        self.runner: Any = (
            WholeRunner("dit", self.pipeline, device, attachments)
            if isinstance(self.pipeline, WholePipeline)
            else StepRunner("dit", self.pipeline, device, attachments, cache_bytes=cache_bytes)
        )
        self.executor = TurnExecutor(self.runner)
        self.engine = DiffusionEngine(
            "dit",
            self.executor,
            ItemTable(max_batch_size, max_prepared),
            mode=self.pipeline.capabilities.mode,
            emits_video=False,
            clock=lambda: self.now,
        )
        self.progress: dict[str, list[int]] = {}
        self.previews: dict[str, list[StageOutput]] = {}
        self.ended: dict[str, StageOutput] = {}
        self.ended_s: dict[str, float] = {}

    def _pass_time(self, *_: object) -> None:
        self.now += STEP_S

    def add(
        self,
        request_id: str,
        prompt: str | None = None,
        *,
        deadline_s: float = np.inf,
        **fields: Any,
    ) -> DiffusionRequest:
        preview_interval = fields.pop("preview_interval", None)
        made = request(request_id, prompt, **fields)
        self.engine.add(made, deadline_s=deadline_s, preview_interval=preview_interval)
        return made

    def turn(self, count: int = 1) -> None:
        """The engine decides, and every lane ends what it was given."""
        for _ in range(count):
            self._take(self.engine.step())
            self.executor.turn()

    def run(self) -> None:
        """Until every request has ended."""
        for _ in range(1000):
            if not len(self.engine):
                return
            self.turn()
        raise AssertionError(f"never ends: {self.engine!r}")

    def pixels(self, request_id: str) -> NDArray[np.uint8]:
        frames = self.ended[request_id].frames
        assert frames is not None, self.ended[request_id].failure
        return frames.array()[0]

    def failure(self, request_id: str) -> tuple[str, str]:
        failure = self.ended[request_id].failure
        assert failure is not None
        return failure.code, failure.message

    def _take(self, outputs: Sequence[StageOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ended, "an output after the last one"
            if output.finished:
                self.ended[output.request_id] = output
                self.ended_s[output.request_id] = self.now
            elif output.preview is not None:
                self.previews.setdefault(output.request_id, []).append(output)
            elif output.progress is not None:
                self.progress.setdefault(output.request_id, []).append(output.progress.step)
