"""What leaves a replica for each step, seen at the sender."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from vllm_omni.core.token_streams import TokenStreams, encode_tokens, targets_of


class RecordingSender:
    """A `Sender` that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def open(self, address: str, stream: str) -> None:
        self.calls.append(("open", address, stream))

    def push(
        self, stream: str, payload: bytes | bytearray | memoryview, meta: Mapping[str, Any] | None
    ) -> None:
        assert meta == {"kind": "tokens"}
        self.calls.append(("push", stream, bytes(payload)))

    def end(self, stream: str, reason: str = "stop") -> None:
        self.calls.append(("end", stream, reason))

    def fail(self, stream: str, message: str) -> None:
        self.calls.append(("fail", stream, message))

    def close(self) -> None:
        self.calls.append(("close",))


def params(*streams: str, **changes: Any) -> SamplingParams:
    routes = [["ipc:///voice", stream] for stream in streams]
    return SamplingParams(extra_args={"omni_targets": routes}, **changes)


@pytest.fixture
def sender() -> RecordingSender:
    return RecordingSender()


def opened(sender: RecordingSender, wanted: SamplingParams | None) -> TokenStreams:
    streams = TokenStreams(sender)
    streams.open("r", wanted)
    sender.calls.clear()
    return streams


def test_tokens_are_little_endian_words() -> None:
    assert encode_tokens([1, 258, 100_000]) == b"\x01\0\0\0\x02\x01\0\0\xa0\x86\x01\0"


def test_a_request_without_targets_sends_nothing(sender: RecordingSender) -> None:
    streams = opened(sender, SamplingParams())
    streams.push([EngineCoreOutput("r", [5], finish_reason=FinishReason.LENGTH)])

    assert sender.calls == []
    assert targets_of(None) == targets_of(SamplingParams()) == []


def test_every_step_is_one_frame_and_the_finish_reason_is_the_end(sender: RecordingSender) -> None:
    streams = opened(sender, params("s"))
    streams.push([EngineCoreOutput("r", [5]), EngineCoreOutput("other", [9])])
    streams.push([EngineCoreOutput("r", [6, 7], finish_reason=FinishReason.LENGTH)])

    assert sender.calls == [
        ("push", "s", encode_tokens([5])),
        ("push", "s", encode_tokens([6, 7])),
        ("end", "s", "length"),
    ]
    assert repr(streams) == "<TokenStreams open=0>"


def test_the_stop_token_is_left_out_unless_it_is_part_of_the_text(sender: RecordingSender) -> None:
    last = EngineCoreOutput("r", [5, 2], finish_reason=FinishReason.STOP)
    opened(sender, params("s")).push([last])
    opened_calls = list(sender.calls)
    opened(sender, params("s", stop=["x"], include_stop_str_in_output=True)).push([last])

    assert opened_calls == [("push", "s", encode_tokens([5])), ("end", "s", "stop")]
    assert sender.calls == [("push", "s", encode_tokens([5, 2])), ("end", "s", "stop")]


def test_a_request_that_only_writes_its_stop_token_ends_without_a_frame(
    sender: RecordingSender,
) -> None:
    opened(sender, params("s")).push([EngineCoreOutput("r", [2], finish_reason=FinishReason.STOP)])

    assert sender.calls == [("end", "s", "stop")]


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_finish_reason_ends_the_stream_once(
    sender: RecordingSender, reason: FinishReason
) -> None:
    streams = opened(sender, params("s"))
    streams.finish(["r"], reason)
    streams.finish(["r"], reason)

    (call,) = sender.calls
    assert call[0] == ("fail" if reason is FinishReason.ERROR else "end")
    assert call[2] in ("stop", "length", "abort", "the engine failed this request")


def test_a_request_refused_before_it_was_added_fails_its_streams(sender: RecordingSender) -> None:
    TokenStreams(sender).refuse(params("a", "b"), "unreadable")

    assert sender.calls == [
        ("open", "ipc:///voice", "a"),
        ("fail", "a", "unreadable"),
        ("open", "ipc:///voice", "b"),
        ("fail", "b", "unreadable"),
    ]


def test_what_is_open_when_the_replica_stops_fails(sender: RecordingSender) -> None:
    streams = opened(sender, params("a", "b"))
    streams.close("stopped")

    assert sender.calls == [("fail", "a", "stopped"), ("fail", "b", "stopped")]


class FailingSender(RecordingSender):
    """Fails for one stream."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self._operation = operation

    def _check(self, operation: str, stream: str) -> None:
        if (operation, stream) == (self._operation, "bad"):
            raise OSError("too many open files")

    def open(self, address: str, stream: str) -> None:
        self._check("open", stream)
        super().open(address, stream)

    def push(
        self, stream: str, payload: bytes | bytearray | memoryview, meta: Mapping[str, Any] | None
    ) -> None:
        self._check("push", stream)
        super().push(stream, payload, meta)

    def end(self, stream: str, reason: str = "stop") -> None:
        self._check("end", stream)
        super().end(stream, reason)

    def fail(self, stream: str, message: str) -> None:
        self._check("fail", stream)
        super().fail(stream, message)


@pytest.fixture
def quiet() -> None:
    logging.getLogger("vllm_omni.core").setLevel(logging.CRITICAL)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("operation", ["push", "end", "fail"])
def test_a_stream_that_cannot_be_written_never_reaches_the_busy_loop(operation: str) -> None:
    sender = FailingSender(operation)
    streams = TokenStreams(sender)
    streams.open("r", params("bad"))
    streams.open("good", params("s"))
    last = EngineCoreOutput("r", [5], finish_reason=FinishReason.LENGTH)
    streams.push([last, EngineCoreOutput("good", [6])])
    streams.finish(["good"], FinishReason.ERROR)
    streams.close("stopped")

    assert ("push", "s", encode_tokens([6])) in sender.calls
    assert ("fail", "s", "the engine failed this request") in sender.calls
    if operation == "push":
        assert ("fail", "bad", "its tokens could not be sent") in sender.calls
    assert repr(streams) == "<TokenStreams open=0>"


@pytest.mark.usefixtures("quiet")
def test_streams_that_cannot_all_be_opened_are_failed_and_said() -> None:
    sender = FailingSender("open")
    streams = TokenStreams(sender)
    with pytest.raises(OSError, match="too many open files"):
        streams.open("r", params("first", "bad"))
    streams.refuse(params("bad"), "unreadable")

    assert ("fail", "first", "a stream of this request could not be opened") in sender.calls
    assert repr(streams) == "<TokenStreams open=0>"
