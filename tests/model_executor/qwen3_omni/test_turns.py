"""What the talker hears of a prompt."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_omni.model_executor.models.qwen3_omni.turns import Turns, turns_of

START, SYSTEM, USER, ASSISTANT, END = 1, 2, 3, 4, 5
SOUND, SIGHT, AUDIO, VIDEO = 7, 8, 9, 11
CONFIG = SimpleNamespace(
    im_start_token_id=START,
    user_token_id=USER,
    assistant_token_id=ASSISTANT,
    audio_token_id=AUDIO,
    image_token_id=10,
    video_token_id=VIDEO,
    audio_start_token_id=SOUND,
    vision_start_token_id=SIGHT,
)
SYSTEM_TURN = [START, SYSTEM, 50, END]
REPLY = [START, ASSISTANT, 6]


def turns(*parts: list[int]) -> Turns:
    return turns_of(np.array([token for part in parts for token in part]), CONFIG)


def test_only_the_users_turns_are_heard() -> None:
    found = turns(
        SYSTEM_TURN,
        [START, USER, 60, END],
        [START, ASSISTANT, 70, END],
        [START, USER, 61, END],
        REPLY,
    )

    assert found.user.tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    assert found.reply.tolist() == REPLY


def test_text_and_media_make_runs() -> None:
    found = turns([START, USER, AUDIO, AUDIO, 60, END], REPLY)

    runs = [(run.is_media, run.positions.tolist()) for run in found.user_runs()]
    assert runs == [(False, [0, 1]), (True, [2, 3]), (False, [4, 5])]
    assert found.media_positions == [2, 3]


def test_a_prompt_without_a_user_has_nothing_to_hear() -> None:
    found = turns(SYSTEM_TURN, REPLY)

    assert (found.num_user, list(found.user_runs())) == (0, [])
    assert found.positions_heard(np.tile(np.arange(7), (3, 1)), 2).tolist() == [[0, 1]] * 3


def test_a_prompt_without_a_reply_is_refused() -> None:
    with pytest.raises(ValueError, match="last turn is the assistant's"):
        turns([START, USER, 60])


def test_positions_of_text_count_on_across_what_is_left_out() -> None:
    found = turns(SYSTEM_TURN, [START, USER, 60, END], SYSTEM_TURN, [START, USER, 61, END], REPLY)

    heard = found.positions_heard(np.tile(np.arange(19), (3, 1)), 3)

    assert heard.tolist() == [list(range(11))] * 3


def test_positions_of_media_keep_their_shape() -> None:
    # An image of two patches side by side: one step in time, two in width.
    positions = np.array(
        [
            [0, 1, 2, 3, 4, 5, 6, 6, 8, 9],
            [0, 1, 2, 3, 4, 5, 6, 6, 8, 9],
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        ]
    )
    found = turns(SYSTEM_TURN, [START, USER, 10, 10, 60, END], REPLY)

    heard = found.positions_heard(np.hstack([positions, positions[:, -3:] + 3]), 2)

    assert heard.tolist() == [
        [0, 1, 2, 2, 4, 5, 6, 7],
        [0, 1, 2, 2, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]


def test_a_video_that_is_heard_is_counted_token_by_token() -> None:
    found = turns([START, USER, SIGHT, SOUND, VIDEO, VIDEO, AUDIO, 60, 61, END], REPLY)
    thinker = np.array([[0, 1, 2, 3, 4, 4, 4, 6, 7, 8, 9, 10, 11]] * 3)
    thinker[2, 5] = 5

    assert found.positions_heard(thinker, 2).tolist() == [list(range(12))] * 3


def test_a_video_that_is_only_seen_keeps_its_axes() -> None:
    found = turns([START, USER, SIGHT, VIDEO, VIDEO, 60, END], REPLY)
    thinker = np.array([[20, 21, 22, 23, 23, 25, 26, 27, 28, 29]] * 3)
    thinker[2, 4] = 24

    heard = found.positions_heard(thinker, 1)

    assert heard[0].tolist() == [0, 1, 2, 3, 3, 5, 6, 7]
    assert heard[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
