"""What leaves a replica for each step, seen at the sender."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from vllm_omni.core.payloads import StepPayload
from vllm_omni.core.token_streams import TokenStreams, encode_tokens, targets_of


class RecordingSender:
    """A `Sender` that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.num_parcels = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        self.num_parcels += 1
        yield

    def open(self, address: str, stream: str) -> None:
        self.calls.append(("open", address, stream))

    def push(
        self, stream: str, payload: bytes | bytearray | memoryview, meta: Mapping[str, Any] | None
    ) -> None:
        assert meta is not None
        kind = () if meta == {"kind": "tokens"} else (meta["kind"],)
        self.calls.append(("push", stream, bytes(payload), *kind))

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


def test_what_one_step_wrote_leaves_together(sender: RecordingSender) -> None:
    streams = opened(sender, params("s"))
    streams.open("other", params("t"))
    sender.calls.clear()

    streams.push([EngineCoreOutput("r", [5]), EngineCoreOutput("other", [6])])

    assert [call[1] for call in sender.calls] == ["s", "t"]
    assert sender.num_parcels == 1


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


def test_streams_that_cannot_all_be_opened_are_failed_and_said() -> None:
    sender = FailingSender("open")
    streams = TokenStreams(sender)
    with pytest.raises(OSError, match="too many open files"):
        streams.open("r", params("first", "bad"))
    streams.refuse(params("bad"), "unreadable")

    assert ("fail", "first", "a stream of this request could not be opened") in sender.calls
    assert repr(streams) == "<TokenStreams open=0>"


def carrying(token_ids: list[int], *payloads: StepPayload, **fields: Any) -> EngineCoreOutput:
    output = EngineCoreOutput("r", token_ids, **fields)
    output.pooling_output = list(payloads)  # type: ignore[assignment]
    return output


ROWS = StepPayload({"kind": "rows"}, np.array([1.0, 2.0], np.float32))
CODES = StepPayload({"kind": "codes", "groups": 2}, np.array([[3, 4]], np.int32))


def test_a_stream_that_conditions_begins_with_the_prompt_and_carries_rows(
    sender: RecordingSender,
) -> None:
    streams = TokenStreams(sender)
    routes = [["ipc:///talker", "t", True], ["ipc:///voice", "v", False]]
    streams.open("r", SamplingParams(extra_args={"omni_targets": routes}), [7, 8])
    output = carrying([5], ROWS)
    streams.push([output])

    assert sender.calls[2:] == [
        ("push", "t", encode_tokens([7, 8]), "prompt"),
        ("push", "t", ROWS.data.tobytes(), "rows"),
        ("push", "t", encode_tokens([5])),
        ("push", "v", encode_tokens([5])),
    ]
    assert output.pooling_output is None, "it does not leave the core"


def test_codes_stand_for_the_token_they_were_made_of(sender: RecordingSender) -> None:
    streams = opened(sender, params("s"))
    streams.push([carrying([5], CODES)])
    streams.push([carrying([9], CODES, finish_reason=FinishReason.STOP)])

    assert sender.calls == [
        ("push", "s", CODES.data.tobytes(), "codes"),
        ("end", "s", "stop"),
    ]


def test_a_limit_keeps_the_last_codes(sender: RecordingSender) -> None:
    streams = opened(sender, params("s"))
    streams.push([carrying([5], CODES, finish_reason=FinishReason.LENGTH)])

    assert sender.calls == [
        ("push", "s", CODES.data.tobytes(), "codes"),
        ("end", "s", "length"),
    ]


def test_payloads_of_requests_without_streams_are_taken_off_too(sender: RecordingSender) -> None:
    output = carrying([5], ROWS)
    opened(sender, None).push([output])

    assert (sender.calls, output.pooling_output) == ([], None)
