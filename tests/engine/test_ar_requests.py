"""Order and joining of outputs: parts one after the other, clips of one audio as one text."""

from __future__ import annotations

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from vllm_omni.engine.ar_requests import PartOutputs, RunningRequest
from vllm_omni.engine.messages import StageOutput

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
CUMULATIVE = RequestOutputKind.CUMULATIVE


def text(words: str, *tokens: int, finished: bool = False, index: int = 0) -> RequestOutput:
    completion = CompletionOutput(
        index=index,
        text=words,
        token_ids=list(tokens),
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="length" if finished else None,
    )
    return RequestOutput("key", None, [0], None, [completion], finished)


def running(kind: RequestOutputKind, *segments: int, separator: str = " ") -> RunningRequest:
    return RunningRequest("r", [PartOutputs(kind, n, separator) for n in segments])


def put(request: RunningRequest, part: int, segment: int, output: RequestOutput) -> list[str]:
    return [describe(out) for out in request.outputs(part, segment, output)]


def describe(output: StageOutput) -> str:
    completion = output.text.outputs[0]
    marks = ("." if output.text.finished else "") + ("!" if output.finished else "")
    return f"{completion.text}{list(completion.token_ids)}{marks}"


def test_one_prompt_passes_through() -> None:
    request = running(DELTA, 1)

    assert put(request, 0, 0, text("a", 1)) == ["a[1]"]
    assert put(request, 0, 0, text("b", 2, finished=True)) == ["b[2].!"]
    assert request.finished


def test_a_later_part_waits_for_the_earlier_one() -> None:
    request = running(DELTA, 1, 1)

    assert put(request, 1, 0, text("x", 9)) == []
    assert put(request, 1, 0, text("y", 8, finished=True)) == []
    assert put(request, 0, 0, text("a", 1)) == ["a[1]"]
    assert put(request, 0, 0, text("b", 2, finished=True)) == ["b[2].", "xy[9, 8].!"]
    assert request.finished


def test_only_the_last_of_all_parts_finishes_the_request() -> None:
    request = running(FINAL, 1, 1, 1)

    assert put(request, 2, 0, text("c", finished=True)) == []
    assert put(request, 0, 0, text("a", finished=True)) == ["a[]."]
    assert not request.finished
    assert put(request, 1, 0, text("b", finished=True)) == ["b[].", "c[].!"]


def test_deltas_of_two_clips_are_joined_by_a_separator() -> None:
    request = running(DELTA, 2)

    assert put(request, 0, 1, text("", 7)) == []
    assert put(request, 0, 0, text("one", 1)) == ["one[1]"]
    assert put(request, 0, 0, text("", 2, finished=True)) == ["[2]", "[7]"]
    assert put(request, 0, 1, text("two", 8)) == [" two[8]"]
    assert put(request, 0, 1, text("!", 9, finished=True)) == ["![9].!"]


def test_final_texts_of_clips_leave_as_one() -> None:
    request = running(FINAL, 3)

    assert put(request, 0, 0, text("one", 1, finished=True)) == []
    assert put(request, 0, 2, text("three", 3, finished=True)) == []
    assert put(request, 0, 1, text("two", 2, finished=True)) == ["one two three[1, 2, 3].!"]


def test_a_silent_clip_adds_no_separator() -> None:
    request = running(FINAL, 3)
    put(request, 0, 0, text("one", 1, finished=True))
    put(request, 0, 1, text("", 2, finished=True))

    assert put(request, 0, 2, text("three", 3, finished=True)) == ["one three[1, 2, 3].!"]


def test_cumulative_texts_grow_over_the_clips() -> None:
    request = running(CUMULATIVE, 2, separator="")

    assert put(request, 0, 0, text("a", 1, finished=True)) == ["a[1]"]
    assert put(request, 0, 1, text("b", 2)) == ["ab[1, 2]"]
    assert put(request, 0, 1, text("bc", 2, 3, finished=True)) == ["abc[1, 2, 3].!"]


def test_the_finish_reason_of_an_inner_clip_is_not_the_request_s() -> None:
    request = running(DELTA, 2)
    (first,) = request.outputs(0, 0, text("a", 1, finished=True))
    (last,) = request.outputs(0, 1, text("b", 2, finished=True))

    assert first.text.outputs[0].finish_reason is None
    assert last.text.outputs[0].finish_reason == "length"


def test_outputs_carry_the_stage_request_s_id() -> None:
    (output,) = running(DELTA, 1).outputs(0, 0, text("a", 1))

    assert output.request_id == output.text.request_id == "r"
