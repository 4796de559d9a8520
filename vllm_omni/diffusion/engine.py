"""The diffusion engine: what each lane does next, and what becomes of each request.

No sockets and no clock of its own: the replica's loop feeds it commands and calls `step`, which
never waits: jobs run in the executor's lanes and wake the loop when they end.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vllm_omni.diffusion.executor.base import Executor
from vllm_omni.diffusion.executor.jobs import (
    Broken,
    Decode,
    Job,
    Lane,
    Made,
    Prepare,
    Prepared,
    Preview,
    Previewed,
    Progressed,
    Result,
    Run,
    Step,
    Stepped,
)
from vllm_omni.diffusion.models.interface import ExecutionMode
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.sched.decisions import Item, MediaWork, Phase
from vllm_omni.diffusion.sched.table import ItemTable
from vllm_omni.engine.messages import StageFailure, StageOutput
from vllm_omni.outputs.media import Frames, StepProgress

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    request: DiffusionRequest
    deadline_s: float
    is_video: bool


class DiffusionEngine:
    """Every method but `figures` runs in the replica's one thread."""

    def __init__(
        self,
        stage: str,
        executor: Executor,
        table: ItemTable,
        *,
        mode: ExecutionMode,
        emits_video: bool,
        clock: Callable[[], float],
    ) -> None:
        self._stage = stage
        self._executor = executor
        self._table = table
        self._mode = mode
        self._emits_video = emits_video
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._deadlines: list[tuple[float, str]] = []
        """A heap; entries of requests that are over stay until they come up."""
        self._outputs: list[StageOutput] = []
        self._running: dict[Lane, int] = {}
        """Which job each busy lane has, by its number."""
        self._num_jobs = 0
        self._num_progressed = 0
        """Steps that whole runs reported."""

    def __repr__(self) -> str:
        return f"<DiffusionEngine {self._stage} {self._table!r}>"

    def __len__(self) -> int:
        """Requests that are here."""
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        """A step would do something now, without anything having come."""
        return bool(self._outputs)

    @property
    def next_deadline_s(self) -> float:
        """The earliest deadline on the engine's clock; infinity when there is none."""
        while self._deadlines and self._is_stale(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def _is_stale(self, deadline_s: float, request_id: str) -> bool:
        known = self._requests.get(request_id)
        return known is None or known.deadline_s != deadline_s

    def figures(self) -> Mapping[str, float]:
        """For the heartbeat; called in another thread."""
        num_begun = self._table.num_begun
        running = list(self._running.values())
        # By the oldest running job, so that a lane which hangs shows beside one that goes on.
        return {
            **self._executor.figures(),
            "num_running": num_begun,
            "num_waiting": self._table.num_waiting,
            "num_requests": len(self._requests),
            "progress": min(running, default=self._num_jobs) + self._num_progressed,
            "num_runnable": max(num_begun, len(running)),
        }

    def add(
        self,
        request: DiffusionRequest,
        *,
        deadline_s: float = math.inf,
        preview_interval: int | None = None,
    ) -> None:
        """Take a request on; it waits for its turn."""
        request_id = request.request_id
        if request_id in self._requests:
            logger.error("stage %s: request %s is running already", self._stage, request_id)
            return
        self._requests[request_id] = _Request(request, deadline_s, self._emits_video)
        self._table.add(request_id, preview_interval)
        if deadline_s != math.inf:
            heapq.heappush(self._deadlines, (deadline_s, request_id))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; ids that are not here are ignored. Nothing more is heard of them."""
        for request_id in request_ids:
            if request_id in self._requests:
                self._release(request_id)

    def step(self) -> list[StageOutput]:
        """Take results, drop what is late, give idle lanes work; return all new outputs.

        Raises:
            Exception: the pipeline is broken; the replica cannot go on.
        """
        for result in self._executor.take_results():
            self._take(result)
        for lane in [lane for lane in self._running if self._executor.is_idle(lane)]:
            del self._running[lane]
        self._drop_late()
        self._feed_denoise()
        self._feed_media()
        outputs, self._outputs = self._outputs, []
        return outputs

    def fail_all(self, code: str, message: str) -> list[StageOutput]:
        """End every request with this failure."""
        for request_id in list(self._requests):
            self._fail(request_id, StageFailure(code, message))
        outputs, self._outputs = self._outputs, []
        return outputs

    def _take(self, result: Result) -> None:
        match result:
            case Prepared():
                self._on_prepared(result)
            case Stepped():
                for request_id in result.request_ids:
                    self._on_stepped(request_id, result.failures.get(request_id))
            case Progressed(request_id, step, num_steps):
                item = self._table.get(request_id)
                self._num_progressed += 1
                if item is not None:
                    item.step, item.num_steps = step, num_steps
                    self._report_progress(item)
            case Previewed():
                self._on_preview(result)
            case Made():
                self._on_made(result)
            case Broken(error):
                raise error

    def _on_prepared(self, result: Prepared) -> None:
        item = self._table.get(result.request_id)
        if item is None:  # aborted meanwhile, when the worker did not have it yet
            self._executor.drop([result.request_id])
        elif result.failure is not None:
            self._fail(item.request_id, result.failure)
        else:
            item.key, item.num_steps = result.key, result.num_steps
            item.step = item.preview_step = result.step
            item.phase = self._phase_after_step(item)

    def _on_stepped(self, request_id: str, failure: StageFailure | None) -> None:
        item = self._table.get(request_id)
        if item is None:  # aborted meanwhile
            return
        if failure is not None:
            self._fail(request_id, failure)
            return
        item.step += 1
        item.phase = self._phase_after_step(item)
        self._report_progress(item)

    def _phase_after_step(self, item: Item) -> Phase:
        return Phase.RUNNABLE if item.step < item.num_steps else Phase.DENOISED

    def _report_progress(self, item: Item) -> None:
        progress = StepProgress(item.step, item.num_steps)
        self._outputs.append(StageOutput(item.request_id, progress=progress))

    def _on_preview(self, result: Previewed) -> None:
        item = self._table.get(result.request_id)
        if item is None or result.pixels is None:
            return
        progress = StepProgress(item.step, item.num_steps)
        preview = Frames.of(result.pixels)
        self._outputs.append(StageOutput(item.request_id, preview=preview, progress=progress))

    def _on_made(self, made: Made) -> None:
        known = self._requests.get(made.request_id)
        if known is None:  # aborted meanwhile
            return
        if made.failure is not None or made.pixels is None:
            failure = made.failure or StageFailure(
                "request_failed", f"stage {self._stage} stopped before there was anything"
            )
            self._fail(made.request_id, failure)
            return
        rate = float(known.request.fps or 1) if known.is_video else None
        item = self._table.get(made.request_id)
        progress = StepProgress(item.num_steps, item.num_steps) if item is not None else None
        self._release(made.request_id)
        self._outputs.append(
            StageOutput(
                made.request_id,
                finished=True,
                frames=Frames.of(made.pixels, rate),
                progress=progress,
            )
        )

    def _feed_denoise(self) -> None:
        if not self._executor.is_idle(Lane.DENOISE):
            return
        if self._mode is ExecutionMode.REQUEST:
            item = self._table.next_waiting()
            if item is not None:
                self._table.begin(item, Phase.STEPPING)
                request = self._requests[item.request_id].request
                self._submit(Lane.DENOISE, Run(request))
            return
        batch = self._table.take_batch()
        if batch:
            ids = tuple(item.request_id for item in batch)
            self._submit(Lane.DENOISE, Step(ids))

    def _feed_media(self) -> None:
        if self._mode is ExecutionMode.REQUEST or not self._executor.is_idle(Lane.MEDIA):
            return
        work = self._table.next_media_work()
        if work is None:
            return
        kind, item = work
        match kind:
            case MediaWork.PREPARE:
                self._table.begin(item, Phase.PREPARING)
                self._submit(Lane.MEDIA, Prepare(self._requests[item.request_id].request))
            case MediaWork.PREVIEW:
                item.preview_step = item.step
                self._submit(Lane.MEDIA, Preview(item.request_id))
            case MediaWork.DECODE:
                item.phase = Phase.DECODING
                self._submit(Lane.MEDIA, Decode(item.request_id))

    def _submit(self, lane: Lane, job: Job) -> None:
        self._num_jobs += 1
        self._running[lane] = self._num_jobs
        self._executor.submit(lane, job)

    def _drop_late(self) -> None:
        now = self._clock()
        while self.next_deadline_s <= now:
            _, request_id = heapq.heappop(self._deadlines)
            text = f"stage {self._stage}: the deadline passed {self._standing(request_id)}"
            self._fail(request_id, StageFailure("deadline_exceeded", text))

    def _standing(self, request_id: str) -> str:
        """Where a request is, for the text of a deadline."""
        item = self._table.get(request_id)
        if item is None:
            return f"while waiting for its turn behind {self._table.num_begun} others"
        if item.phase is Phase.PREPARING:
            return "while its prompt was encoded"
        if item.phase in (Phase.DENOISED, Phase.DECODING):
            return "while waiting for its latents to be decoded"
        return f"at step {item.step} of {item.num_steps}"

    def _fail(self, request_id: str, failure: StageFailure) -> None:
        self._release(request_id)
        self._outputs.append(StageOutput(request_id, finished=True, failure=failure))

    def _release(self, request_id: str) -> None:
        """The only way out of a request, whatever ended it."""
        del self._requests[request_id]
        self._table.remove(request_id)
        self._executor.drop([request_id])
