"""When which rows of a request leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from vllm_omni.config.pipeline import CaptureScope
from vllm_omni.core.token_streams import TARGETS_KEY
from vllm_omni.worker.conditioned_inputs import Scheduled
from vllm_omni.worker.sent_rows import ReadPrompt, SentRows

CONDITIONS = SamplingParams(extra_args={TARGETS_KEY: [["tcp://127.0.0.1:1", "r/states", True]]})
PLAIN = SamplingParams(extra_args={TARGETS_KEY: [["tcp://127.0.0.1:1", "r/words", False]]})
POSITIONS = torch.arange(15).reshape(3, 5)


def prompt(*media: tuple[int, int], num_tokens: int = 5) -> Any:
    features = [
        SimpleNamespace(mm_position=SimpleNamespace(offset=at, length=length, is_embed=None))
        for at, length in media
    ]
    return lambda request_id: ReadPrompt(num_tokens, features, lambda: POSITIONS)


@pytest.fixture
def sent() -> SentRows:
    made = SentRows(CaptureScope.ALL)
    made.begin("r", CONDITIONS)
    return made


def spans(sent: SentRows, first: int, count: int, prompt_of: Any = None) -> list[Any]:
    batch = [Scheduled("other", 0, 3), Scheduled("r", first, count)]
    return [(due.row, due.spans) for due in sent.due(batch, prompt_of or prompt())]


def test_a_prompt_leaves_when_it_is_read_and_each_token_with_its_step(sent: SentRows) -> None:
    assert spans(sent, 0, 4) == []
    assert spans(sent, 4, 1) == [(1, [[0, 5]])]
    assert spans(sent, 5, 1) == [(1, [[5, 1]])]


def test_what_is_computed_again_is_not_sent_again(sent: SentRows) -> None:
    assert spans(sent, 0, 5) == [(1, [[0, 5]])]
    sent.begin("r", CONDITIONS)  # preempted: it comes as a new one

    assert spans(sent, 0, 5) == []
    assert spans(sent, 5, 1) == [(1, [[5, 1]])]


def test_only_requests_that_condition_a_stage_are_sent_until_they_end(sent: SentRows) -> None:
    sent.begin("other", PLAIN)
    assert [due.part.request_id for due in sent.due([Scheduled("other", 0, 9)], prompt())] == []

    sent.finish(["r", "never seen"])

    assert spans(sent, 0, 5) == []


def test_of_media_alone_all_leaves_once_with_the_positions_of_the_prompt() -> None:
    sent = SentRows(CaptureScope.MEDIA)
    sent.begin("r", CONDITIONS)

    (due,) = sent.due([Scheduled("r", 0, 5)], prompt((1, 1), (3, 2)))

    assert due.spans == [[1, 1], [3, 2]]
    assert [payload.data.tolist() for payload in due.payloads] == [POSITIONS.tolist()]
    assert not due.is_of_this_step
    assert sent.due([Scheduled("r", 5, 1)], prompt((1, 1), (3, 2))) == []


def test_a_prompt_of_words_has_nothing_but_words(sent: SentRows) -> None:
    (due,) = sent.due([Scheduled("r", 0, 5)], prompt())

    assert due.payloads == []
    assert due.is_of_this_step
