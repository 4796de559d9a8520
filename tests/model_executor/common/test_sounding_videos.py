from __future__ import annotations

import pytest
import torch
from vllm.multimodal.utils import get_mm_embedding_modalities, set_mm_embedding_modality

from vllm_omni.model_executor.models.common.sounding_videos import in_order, sounds_and_own

AUDIO, VIDEO = 7, 8


@pytest.mark.parametrize(
    ("prompt", "sounds", "own"),
    [
        ([1, VIDEO, 2], [0], []),
        ([AUDIO, 1, VIDEO, AUDIO], [1], [0, 2]),
        ([VIDEO, VIDEO, AUDIO], [0, 1], [2]),
        ([1, 2], [], []),
    ],
)
def test_audio_items_are_told_apart_by_their_place(
    prompt: list[int], sounds: list[int], own: list[int]
) -> None:
    assert sounds_and_own(prompt, AUDIO, VIDEO) == (sounds, own)


def rows(kind: str, *values: int) -> torch.Tensor:
    return set_mm_embedding_modality(torch.tensor(values)[:, None], kind)


def flat(pieces: list[torch.Tensor]) -> list[int]:
    return torch.cat(pieces)[:, 0].tolist()


def test_the_end_of_a_sound_stands_before_the_picture_that_follows_it() -> None:
    given = [rows("video", 1, 2), rows("audio", 10, 11)]
    pieces = in_order(given, [True, True, False, False])
    assert flat(pieces) == [10, 11, 1, 2]
    assert get_mm_embedding_modalities(pieces) == ["audio", "video"]


def test_items_of_both_kinds_are_cut_where_they_alternate() -> None:
    given = [rows("image", 1), rows("video", 2, 3), rows("audio", 10, 11), rows("audio", 12)]
    pieces = in_order(given, [False, False, True, False, True, True])
    assert flat(pieces) == [1, 2, 10, 3, 11, 12]
    assert get_mm_embedding_modalities(pieces) == [
        "image", "video", "audio", "video", "audio", "audio",
    ]  # fmt: skip


def test_one_kind_alone_stays_as_it_is() -> None:
    given = [rows("image", 1), rows("video", 2)]
    assert in_order(given, [False, False])[0] is given[0]
