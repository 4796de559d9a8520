"""The requests of a conditioned stage: parked until their prompt is known, then fed step by step.

Frames arrive in the connector's thread, are queued (their streams' credits bound the queue) and
wake the core's loop. Everything else runs in that loop. Nothing polls: a parked request is not in
the scheduler, and one that waits for a step's condition is hidden from its count of work.
"""

from __future__ import annotations

import importlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_omni.core.conditioning import (
    SOURCES_KEY,
    Conditioning,
    ConditioningBridge,
    ConditioningBridgeFactory,
    ConditioningContext,
)
from vllm_omni.distributed.omni_connectors.base import Frame, Receiver
from vllm_omni.engine.bridge import StreamEnd
from vllm_omni.engine.messages import StreamSource

logger = logging.getLogger(__name__)


def sources_of(params: SamplingParams | None) -> list[StreamSource]:
    """The streams that feed a request."""
    extra = params.extra_args if params is not None else None
    return [StreamSource(*source) for source in (extra or {}).get(SOURCES_KEY, ())]


def load_bridge(name: str) -> ConditioningBridgeFactory:
    """Import a bridge's factory by `module:name`."""
    module, _, attribute = name.partition(":")
    factory: ConditioningBridgeFactory = getattr(importlib.import_module(module), attribute)
    return factory


class UnfedError(Exception):
    """The stream that feeds a request broke or failed; the text says how."""


@dataclass(slots=True, eq=False)
class _Fed:
    request: Request
    source: StreamSource
    bridge: ConditioningBridge
    has_prompt: bool = False
    has_ended: bool = False
    """Its stream is over."""


@dataclass(slots=True)
class Arrivals:
    """What the frames that arrived lead to, request by request."""

    updates: list[tuple[str, Conditioning]] = field(default_factory=list)
    begun: list[Request] = field(default_factory=list)
    """Parked requests whose prompt is known now; their updates come with them."""
    empty: list[Request] = field(default_factory=list)
    """Parked requests that have nothing to say."""
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Requests that cannot go on, and why."""


class ConditionedRequests:
    """Every method but `on_frame` and `on_arrival` runs in the core's loop."""

    def __init__(self, receiver: Receiver, hf_config: Any, wake: Callable[[], None]) -> None:
        """`wake` makes the core's loop call `take`; callable from any thread."""
        self._receiver = receiver
        self._hf_config = hf_config
        self._wake = wake
        self._fed: dict[str, _Fed] = {}
        self._by_stream: dict[str, _Fed] = {}
        self._arrived: deque[Frame] = deque()
        self._is_woken = False

    def __repr__(self) -> str:
        return f"<ConditionedRequests fed={len(self._fed)} parked={self.num_parked}>"

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._fed

    @property
    def num_parked(self) -> int:
        """Requests that wait for their prompt."""
        return sum(not fed.has_prompt for fed in self._fed.values())

    def ids(self) -> Iterable[str]:
        """Ids of the requests that are parked or fed."""
        return self._fed.keys()

    def request(self, request_id: str) -> Request | None:
        """The request of this id, if it is here."""
        fed = self._fed.get(request_id)
        return fed.request if fed is not None else None

    def replace(self, request: Request) -> None:
        """The request has its prompt now."""
        self._fed[request.request_id].request = request

    def park(self, request: Request) -> None:
        """Take a request that names a source, and wait for its prompt.

        Raises:
            Exception: its bridge cannot be made.
        """
        source, *more = sources_of(request.sampling_params)
        if more:
            raise ValueError("a request is conditioned by one stream")
        params = request.sampling_params
        assert params is not None, "it names its source"
        context = ConditioningContext(self._hf_config, params.extra_args or {})
        fed = _Fed(request, source, load_bridge(source.bridge)(source, context))
        self._fed[request.request_id] = fed
        self._by_stream[source.stream] = fed
        self._receiver.subscribe(source.stream, self.on_frame, self.on_arrival)

    def drop(self, request_ids: Iterable[str]) -> list[Request]:
        """Forget requests that are over; returns those that were still parked."""
        parked = []
        for request_id in request_ids:
            fed = self._fed.pop(request_id, None)
            if fed is None:
                continue
            del self._by_stream[fed.source.stream]
            if not fed.has_ended:
                self._receiver.cancel(fed.source.stream)
            if not fed.has_prompt:
                parked.append(fed.request)
        return parked

    def on_frame(self, frame: Frame) -> None:
        """Take a frame in the connector's thread."""
        self._arrived.append(frame)

    def on_arrival(self) -> None:
        """All frames that came together were taken: requests of one step begin in one step."""
        if not self._is_woken:
            self._is_woken = True
            self._wake()

    def take(self) -> Arrivals:
        """Feed what has arrived to the bridges."""
        self._is_woken = False  # before the queue is read: what comes later wakes again
        arrivals = Arrivals()
        while self._arrived:
            frame = self._arrived.popleft()
            try:
                self._take_one(frame, arrivals)
            finally:
                frame.release()
        return arrivals

    def _take_one(self, frame: Frame, arrivals: Arrivals) -> None:
        fed = self._by_stream.get(frame.stream)
        if fed is None or fed.has_ended:
            return  # its request is over
        request_id = fed.request.request_id
        try:
            update = self._feed(fed, frame)
        except UnfedError as error:
            arrivals.failed.append((request_id, str(error)))
            fed.has_ended = True
        except Exception as error:  # the boundary of one request
            logger.exception("request %s: its bridge failed", request_id)
            arrivals.failed.append((request_id, f"its input could not be read: {error}"))
            self._receiver.cancel(frame.stream)
            fed.has_ended = True
        else:
            self._add(fed, update, arrivals)

    @staticmethod
    def _feed(fed: _Fed, frame: Frame) -> Conditioning:
        if frame.end is None:
            return fed.bridge.feed(frame)
        fed.has_ended = True
        stage = fed.source.stage
        if frame.end == "lost":
            raise UnfedError(f"the stream of stage {stage} broke: {frame.error}")
        if frame.end == "error":
            raise UnfedError(f"stage {stage} failed: {frame.error}")
        if frame.end == "abort":
            raise UnfedError(f"stage {stage} stopped writing")
        return fed.bridge.end(StreamEnd(frame.end, frame.error))

    @staticmethod
    def _add(fed: _Fed, update: Conditioning, arrivals: Arrivals) -> None:
        if update.is_empty:
            assert not fed.has_prompt, "a request that began has something to say"
            arrivals.empty.append(fed.request)
            return
        if update.prompt is not None:
            fed.has_prompt = True
            arrivals.begun.append(fed.request)
        if update.prompt is not None or update.steps or update.is_last:
            assert fed.has_prompt, "a bridge gives the prompt before any step"
            arrivals.updates.append((fed.request.request_id, update))
