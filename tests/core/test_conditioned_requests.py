"""Requests that a stream feeds: parked, begun, fed, ended; all without a core."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_omni.core.conditioned_requests import ConditionedRequests
from vllm_omni.core.conditioning import (
    ConditionedPrompt,
    Conditioning,
    ConditioningContext,
    Rows,
)
from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.engine.bridge import StreamEnd
from vllm_omni.engine.messages import StreamSource


class RecordingReceiver:
    """A `Receiver` that remembers who listens."""

    address = "ipc:///talker"

    def __init__(self) -> None:
        self.listeners: dict[str, Callable[[Frame], None]] = {}
        self.cancelled: list[str] = []

    def subscribe(
        self,
        stream: str,
        on_frame: Callable[[Frame], None],
        on_arrival: Callable[[], None] | None = None,
    ) -> None:
        self.listeners[stream] = on_frame

    def cancel(self, stream: str) -> None:
        self.cancelled.append(stream)

    def close(self) -> None: ...


class CountingBridge:
    """The first frame makes the prompt, each later one a step."""

    def __init__(self, source: StreamSource, context: ConditioningContext) -> None:
        assert context.hf_config == "config"
        self._has_begun = False

    def feed(self, frame: Frame) -> Conditioning:
        if frame.meta.get("broken"):
            raise ValueError("not a frame of mine")
        if self._has_begun:
            return Conditioning(steps=[Rows("text", np.zeros(1))])
        self._has_begun = True
        rows = [Rows("text", np.zeros(3))]
        return Conditioning(prompt=ConditionedPrompt(base=rows, conditions=rows, token_ids=[7] * 3))

    def end(self, end: StreamEnd) -> Conditioning:
        return Conditioning(is_last=self._has_begun, is_empty=not self._has_begun)


def request(request_id: str) -> Request:
    source = [f"{request_id}/s", "thinker", f"{__name__}:CountingBridge", {}]
    params = SamplingParams(max_tokens=5, extra_args={"omni_sources": [source]})
    return Request(request_id, [0], params, None)


@pytest.fixture
def receiver() -> RecordingReceiver:
    return RecordingReceiver()


@pytest.fixture
def wakes() -> list[None]:
    return []


@pytest.fixture
def fed(receiver: RecordingReceiver, wakes: list[None]) -> ConditionedRequests:
    fed = ConditionedRequests(receiver, "config", lambda: wakes.append(None))
    fed.park(request("a"))
    return fed


def frame(request_id: str = "a", **fields: object) -> Frame:
    return Frame(f"{request_id}/s", 0, **fields)  # type: ignore[arg-type]


def test_a_parked_request_begins_when_its_prompt_is_known(fed: ConditionedRequests) -> None:
    assert fed.take().begun == []

    fed.on_frame(frame())
    arrivals = fed.take()

    assert [r.request_id for r in arrivals.begun] == ["a"]
    assert [(rid, len(update.prompt or ())) for rid, update in arrivals.updates] == [("a", 3)]
    assert repr(fed) == "<ConditionedRequests fed=1 parked=0>"


def test_the_core_is_woken_once_for_frames_it_has_not_read(
    fed: ConditionedRequests, wakes: list[None]
) -> None:
    fed.on_frame(frame())
    assert not wakes  # more may have come with it
    fed.on_arrival()
    fed.on_frame(frame())
    fed.on_arrival()
    assert len(wakes) == 1

    assert len(fed.take().updates) == 2
    fed.on_frame(frame())
    fed.on_arrival()
    assert len(wakes) == 2


def test_every_frame_is_released(fed: ConditionedRequests) -> None:
    released: list[str] = []
    fed.on_frame(frame(release=lambda: released.append("good")))
    fed.on_frame(frame(meta={"broken": True}, release=lambda: released.append("broken")))
    fed.on_frame(frame("unknown", release=lambda: released.append("unknown")))
    fed.take()

    assert released == ["good", "broken", "unknown"]


def test_a_source_that_wrote_nothing_leaves_an_empty_request(fed: ConditionedRequests) -> None:
    fed.on_frame(frame(end="stop"))
    arrivals = fed.take()

    assert [r.request_id for r in arrivals.empty] == ["a"]
    assert arrivals.updates == arrivals.failed == []


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("error", "stage thinker failed: no memory"),
        ("lost", "the stream of stage thinker broke: no memory"),
        ("abort", "stage thinker stopped writing"),
    ],
)
def test_a_bad_end_fails_the_request_and_says_why(
    fed: ConditionedRequests, end: str, message: str
) -> None:
    fed.on_frame(frame())
    fed.on_frame(frame(end=end, error="no memory"))

    assert fed.take().failed == [("a", message)]


def test_a_bridge_that_fails_ends_its_request_alone(
    fed: ConditionedRequests, receiver: RecordingReceiver
) -> None:
    fed.park(request("b"))
    fed.on_frame(frame("a", meta={"broken": True}))
    fed.on_frame(frame("b"))
    arrivals = fed.take()

    assert [rid for rid, _ in arrivals.failed] == ["a"]
    assert [r.request_id for r in arrivals.begun] == ["b"]
    assert receiver.cancelled == ["a/s"]


def test_leaving_cancels_a_stream_that_still_runs(
    fed: ConditionedRequests, receiver: RecordingReceiver
) -> None:
    fed.park(request("b"))
    fed.on_frame(frame("b"))
    fed.on_frame(frame("b", end="stop"))
    fed.take()

    assert [r.request_id for r in fed.drop(["a", "b", "c"])] == ["a"]
    assert receiver.cancelled == ["a/s"]
    assert repr(fed) == "<ConditionedRequests fed=0 parked=0>"
