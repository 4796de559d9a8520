"""The one-shot engine: which inputs share the next forward, and what becomes of each request.

No sockets and no clock of its own: `proc.py` feeds it commands and calls `step`. Frames of streams
arrive in the connector's thread; they are put in a queue and the engine's thread is woken.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from vllm_omni.distributed.omni_connectors.base import Frame, Receiver
from vllm_omni.engine.bridge import StreamBridgeFactory
from vllm_omni.engine.messages import StageFailure, StageOutput, StreamSource
from vllm_omni.generation.forward import Result, run_forward
from vllm_omni.generation.memory_errors import free_memory, is_out_of_memory
from vllm_omni.generation.model import OneShotModel, Work
from vllm_omni.generation.request import (
    END_GRACE_S,
    Figures,
    GenerationRequest,
    SourceStream,
    StreamFailedError,
    failure_from,
)
from vllm_omni.outputs.media import AudioChunk

logger = logging.getLogger(__name__)

MAX_FAILED_IN_A_ROW = 3
"""Forwards that gave nothing but errors before the model has to pass its self-test again."""


class OneShotEngine:
    """Every method but `on_frame` runs in the engine's one thread.

    Fair: a request gives at most one input to a forward, and goes to the end of the line after it.
    """

    def __init__(
        self,
        stage: str,
        model: OneShotModel,
        max_batch_size: int,
        *,
        receiver: Receiver | None,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._stage = stage
        self._model = model
        self._max_batch_size = max_batch_size
        self._receiver = receiver
        self._clock = clock
        self._wake = wake
        self._requests: dict[str, GenerationRequest] = {}
        self._by_stream: dict[str, GenerationRequest] = {}
        self._line: deque[GenerationRequest] = deque()
        """Requests with a ready input, each once."""
        self._arrived: deque[Frame] = deque()
        """Frames from the connector's thread; the credits of their streams bound it."""
        self._outputs: list[StageOutput] = []
        self._num_forwards = 0
        self._num_failed_in_a_row = 0

    def __repr__(self) -> str:
        return (
            f"<OneShotEngine {self._stage} requests={len(self._requests)} ready={len(self._line)}>"
        )

    def __len__(self) -> int:
        """Requests that are here."""
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        """A step would do something now."""
        return bool(self._line or self._arrived or self._outputs)

    @property
    def next_deadline_s(self) -> float:
        """The earliest deadline on the engine's clock; infinity when there is none."""
        return min((r.expires_s for r in self._requests.values()), default=math.inf)

    def figures(self) -> Figures:
        """For the heartbeat; called in another thread."""
        ready = len(self._line)
        return {
            "num_running": min(ready, self._max_batch_size),
            "num_waiting": max(0, ready - self._max_batch_size),
            "num_requests": len(self._requests),
            "num_forwards": self._num_forwards,
        }

    def add(
        self,
        request_id: str,
        prompt: object,
        params: object,
        sources: Sequence[StreamSource] = (),
        deadline_s: float = math.inf,
    ) -> None:
        """Begin a request; what is wrong with it becomes its failure."""
        if request_id in self._requests:
            logger.error("stage %s: request %s is running already", self._stage, request_id)
            return
        try:
            streams = {s.stream: SourceStream(s, load_bridge(s.bridge)(s)) for s in sources}
            if streams and self._receiver is None:
                raise ValueError("this replica takes no streams")
            state, inputs = self._model.start(prompt, params)
        except Exception as error:  # noqa: BLE001 - the boundary of one request
            self._report(request_id, error)
            return
        request = GenerationRequest(request_id, state, deque(inputs), streams, deadline_s)
        self._requests[request_id] = request
        for stream in streams:
            self._by_stream[stream] = request
            assert self._receiver is not None
            self._receiver.subscribe(stream, self.on_frame, self._wake)
        self._continue(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; ids that are not here are ignored. Nothing more is heard of them."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._release(request)

    def source_ended(self, request_id: str, stream: str) -> None:
        """The stage that writes a stream has finished: its end is here soon, or it is lost."""
        request = self._requests.get(request_id)
        if request is not None and stream in request.streams:
            request.streams[stream].ended_s = self._clock()

    def on_frame(self, frame: Frame) -> None:
        """Take a frame in the connector's thread."""
        self._arrived.append(frame)

    def step(self) -> list[StageOutput]:
        """Take what has arrived, drop what is late, run one forward; return all new outputs."""
        self._take_arrived()
        self._drop_late()
        batch = [self._line.popleft() for _ in range(min(len(self._line), self._max_batch_size))]
        if batch:
            self._run(batch)
        outputs, self._outputs = self._outputs, []
        return outputs

    def fail_all(self, code: str, message: str) -> list[StageOutput]:
        """End every request with this failure."""
        for request in list(self._requests.values()):
            self._finish(request, failure=StageFailure(code, message))
        outputs, self._outputs = self._outputs, []
        return outputs

    def _run(self, batch: list[GenerationRequest]) -> None:
        self._num_forwards += 1
        works = [Work(r.state, r.ready.popleft(), is_last=r.is_complete) for r in batch]
        results = run_forward(self._model, works)
        self._check_model(results)
        for request, result in zip(batch, results, strict=True):
            if isinstance(result, BaseException):
                self._fail(request, result)
                continue
            if request.is_complete:
                self._finish(request, result)
                continue
            if result is not None:
                self._outputs.append(StageOutput(request.request_id, audio=result))
            self._continue(request)

    def _check_model(self, results: Sequence[Result]) -> None:
        """After failures in a row, or without memory: is it the requests, or the model?"""
        if any(isinstance(r, BaseException) and is_out_of_memory(r) for r in results):
            free_memory()
            self._num_failed_in_a_row = 0
            self._model.self_test()  # raises: see below
            return
        if any(not isinstance(result, BaseException) for result in results):
            self._num_failed_in_a_row = 0
            return
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            self._num_failed_in_a_row = 0
            self._model.self_test()  # raises: the replica ends, its supervisor takes over

    def _take_arrived(self) -> None:
        touched: dict[str, GenerationRequest] = {}
        while self._arrived:
            frame = self._arrived.popleft()
            request = self._by_stream.get(frame.stream)
            if request is None:
                frame.release()  # its request is gone
                continue
            request.frames.append(frame)
            touched[request.request_id] = request
        for request in touched.values():
            was_ready = bool(request.ready)
            self._continue(request, in_line=was_ready)

    def _continue(self, request: GenerationRequest, *, in_line: bool = False) -> None:
        """Take frames that fit; then line up, wait for more, or finish."""
        request.moved_s = self._clock()
        try:
            request.take_frames()
        except Exception as error:  # noqa: BLE001 - the boundary of one request
            self._fail(request, error)
            return
        if request.ready and not in_line:
            self._line.append(request)
        elif request.is_complete:
            self._finish(request)

    def _drop_late(self) -> None:
        now = self._clock()
        for request in [r for r in self._requests.values() if r.expires_s <= now]:
            awaited = request.awaited()
            if request.deadline_s <= now:
                text = f"stage {self._stage}: the deadline passed while waiting for {awaited}"
                self._finish(request, failure=StageFailure("deadline_exceeded", text))
                continue
            text = f"waited {END_GRACE_S:g} s for {awaited}, which has finished writing"
            self._fail(request, StreamFailedError("request_failed", text))

    def _fail(self, request: GenerationRequest, error: BaseException) -> None:
        self._release(request)
        self._report(request.request_id, error)

    def _report(self, request_id: str, error: BaseException) -> None:
        failure = failure_from(error, self._stage)
        if isinstance(error, StreamFailedError):  # another stage's: it has logged how that came
            logger.warning("stage %s: request %s ends: %s", self._stage, request_id, error)
        elif failure.code == "request_failed":
            logger.error("stage %s: request %s failed", self._stage, request_id, exc_info=error)
        self._outputs.append(StageOutput(request_id, finished=True, failure=failure))

    def _finish(
        self,
        request: GenerationRequest,
        audio: AudioChunk | None = None,
        failure: StageFailure | None = None,
    ) -> None:
        self._release(request)
        self._outputs.append(
            StageOutput(request.request_id, finished=True, audio=audio, failure=failure)
        )

    def _release(self, request: GenerationRequest) -> None:
        """The only way out of a request, whatever ended it."""
        del self._requests[request.request_id]
        if request in self._line:
            self._line.remove(request)
        request.drop_frames()
        for stream in request.stream_ids:
            del self._by_stream[stream]
            if stream in request.streams and self._receiver is not None:
                self._receiver.cancel(stream)
        try:
            self._model.finish(request.state)
        except Exception:  # the boundary of one request
            logger.exception("stage %s: request %s did not end well", self._stage, request)


def load_bridge(name: str) -> StreamBridgeFactory:
    """Import a bridge's factory by `module:name`."""
    module, _, attribute = name.partition(":")
    factory: StreamBridgeFactory = getattr(importlib.import_module(module), attribute)
    return factory
