"""Frames of the thinker become the talker's prompt and steps."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_omni.core.conditioning import Conditioning, ConditioningContext
from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.engine.bridge import StreamEnd
from vllm_omni.engine.messages import StreamSource
from vllm_omni.model_executor.models.qwen3_omni.bridges import TalkerConditioning

START, USER, ASSISTANT, LINE, END, AUDIO = 1, 3, 4, 6, 5, 9
CONFIG = SimpleNamespace(
    im_start_token_id=START,
    user_token_id=USER,
    assistant_token_id=ASSISTANT,
    audio_token_id=AUDIO,
    image_token_id=10,
    video_token_id=11,
    vision_start_token_id=8,
    audio_start_token_id=7,
    tts_pad_token_id=100,
    tts_bos_token_id=101,
    tts_eos_token_id=102,
    codec_nothink_id=200,
    codec_think_bos_id=201,
    codec_think_eos_id=202,
    codec_pad_id=203,
    codec_bos_id=204,
    speaker_id={"chelsie": 301, "ethan": 302},
)
PROMPT = [START, USER, 60, END, START, ASSISTANT, LINE]


def bridge(**extra_args: object) -> TalkerConditioning:
    source = StreamSource("s", "thinker", "here:TalkerConditioning")
    return TalkerConditioning(source, ConditioningContext(CONFIG, extra_args))


def tokens(kind: str, ids: Sequence[int]) -> Frame:
    return Frame("s", 0, {"kind": kind}, memoryview(np.array(ids, "<u4").tobytes()))


def rows(values: Sequence[Sequence[float]], spans: Sequence[Sequence[int]]) -> Frame:
    data = np.array(values, np.float32)
    meta = {"kind": "rows", "layer": 0, "spans": spans, "dtype": "float32", "width": data.shape[1]}
    return Frame("s", 0, meta, memoryview(data.tobytes()))


def flat(update: Conditioning) -> list[tuple[str, list[int]]]:
    return [(part.kind, part.data.tolist()) for part in update.steps]


def test_the_prompt_is_complete_with_the_first_token() -> None:
    made = bridge()
    assert made.feed(tokens("prompt", PROMPT)).prompt is None

    prompt = made.feed(tokens("tokens", [70])).prompt

    assert prompt is not None
    text, head = prompt.conditions
    assert text.data.tolist() == [START, USER, 60, END]
    assert head.data.tolist() == [START, ASSISTANT, LINE, 100, 100, 100, 100, 101, 70]
    silent, codes = prompt.base
    assert (silent.kind, len(silent)) == ("none", 7)
    assert codes.data.tolist() == [200, 201, 202, 302, 203, 204]
    assert len(prompt) == sum(map(len, prompt.conditions)) == 13
    assert prompt.positions is None


def test_each_later_token_is_a_step_and_the_end_is_a_word_of_its_own() -> None:
    made = bridge()
    made.feed(tokens("prompt", PROMPT))
    made.feed(tokens("tokens", [70]))

    assert flat(made.feed(tokens("tokens", [71]))) == [("text", [71])]
    assert flat(made.feed(tokens("tokens", [72, 73]))) == [("text", [72, 73])]
    last = made.end(StreamEnd("stop"))
    assert (flat(last), last.is_last) == ([("text", [102])], True)


def test_everything_in_one_frame_is_the_same() -> None:
    made = bridge()
    made.feed(tokens("prompt", PROMPT))
    update = made.feed(tokens("tokens", [70, 71, 72]))

    assert update.prompt is not None
    assert flat(update) == [("text", [71, 72])]


def test_media_are_waited_for_and_put_where_they_were() -> None:
    made = bridge()
    made.feed(tokens("prompt", [START, USER, AUDIO, AUDIO, END, START, ASSISTANT, LINE]))
    assert made.feed(tokens("tokens", [70])).prompt is None

    prompt = made.feed(rows([[0.5, 1.5], [2.5, 3.5]], [[2, 2]])).prompt

    assert prompt is not None
    assert [part.kind for part in prompt.conditions] == ["text", "media", "text", "text"]
    assert prompt.conditions[1].data.tolist() == [[0.5, 1.5], [2.5, 3.5]]


def test_a_reply_without_words_is_empty() -> None:
    made = bridge()
    made.feed(tokens("prompt", PROMPT))

    assert made.end(StreamEnd("stop")).is_empty


@pytest.mark.parametrize(("voice", "token"), [("Chelsie", 301), ("default", 302), ("ethan", 302)])
def test_the_voice_is_a_token_of_the_prompt(voice: str, token: int) -> None:
    made = bridge(voice=voice)
    made.feed(tokens("prompt", PROMPT))
    prompt = made.feed(tokens("tokens", [70])).prompt

    assert prompt is not None
    assert prompt.base[1].data[3] == token


def test_an_unknown_voice_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="no voice 'nobody'; known: chelsie, ethan"):
        bridge(voice="nobody")
