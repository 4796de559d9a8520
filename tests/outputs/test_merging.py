from __future__ import annotations

import pytest

from tests.fakes import text_output
from vllm_omni.outputs.media import AudioChunk
from vllm_omni.outputs.merging import WholeResult, join_audio
from vllm_omni.outputs.request_output import OmniRequestOutput


def step(
    text: str | None = None, pcm: bytes | None = None, index: int = 0, *, finished: bool = False
) -> OmniRequestOutput:
    return OmniRequestOutput(
        request_id="a",
        index=index,
        finished=finished,
        request_output=text_output("a", text, finished=finished).text if text is not None else None,
        audio=AudioChunk(pcm, 8000) if pcm is not None else None,
    )


def test_deltas_are_joined_and_audio_keeps_its_order() -> None:
    whole = WholeResult("a", delta=True)
    for one in (step("one "), step(pcm=b"\x01\x00"), step("two"), step(pcm=b"\x02\x00")):
        whole.add(one)
    whole.add(step("", finished=True))
    result = whole.result()
    assert (result.text, result.finished) == ("one two", True)
    assert result.audio is not None
    assert result.audio.pcm == b"\x01\x00\x02\x00"
    assert result.audios == ()


def test_the_last_cumulative_text_stands() -> None:
    whole = WholeResult("a")
    whole.add(step("one"))
    whole.add(step("one two", finished=True))
    assert whole.result().text == "one two"


def test_choices_are_in_order_whatever_ended_first() -> None:
    whole = WholeResult("a")
    for index in (2, 0, 1):
        output = step(f"text {index}", bytes([index, 0]), index)
        output.outputs[0].index = index
        whole.add(output)
    result = whole.result()
    assert [(c.index, c.text) for c in result.outputs] == [(i, f"text {i}") for i in range(3)]
    assert [audio and audio.pcm[0] for audio in result.audios] == [0, 1, 2]


def test_a_choice_without_audio_is_none() -> None:
    whole = WholeResult("a")
    whole.add(step(pcm=b"\x01\x00", index=1))
    result = whole.result()
    assert result.audio is None
    assert [audio is None for audio in result.audios] == [True, False]


def test_nothing_at_all_is_an_empty_result() -> None:
    result = WholeResult("a").result()
    assert (result.text, result.audio, result.finished) == ("", None, False)


def test_one_stream_has_one_rate() -> None:
    assert join_audio([]) is None
    with pytest.raises(AssertionError, match="sample rate"):
        join_audio([AudioChunk(b"", 8000), AudioChunk(b"", 16000)])


def test_audio_shows_its_length_not_its_bytes() -> None:
    assert repr(AudioChunk(b"\0\0" * 5, 8000)) == "<AudioChunk 5 samples at 8000 Hz>"
