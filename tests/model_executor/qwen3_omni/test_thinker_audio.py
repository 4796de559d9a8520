"""Recordings of several requests in one forward of the audio tower."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_omni.model_executor.models.qwen3_omni.thinker import Thinker

PART = 100
"""Frames of a part of a recording."""


class Tower:
    """Says of each recording what it holds, and up to what its batch was filled."""

    n_window = PART // 2
    dtype = torch.float32

    def __init__(self) -> None:
        self.num_forwards = 0

    def __call__(
        self, features: torch.Tensor, feature_lens: torch.Tensor, aftercnn_lens: torch.Tensor
    ) -> torch.Tensor:
        self.num_forwards += 1
        filled = max(min(int(length), PART) for length in feature_lens)
        recordings = features.split(feature_lens.tolist(), dim=1)
        return torch.cat(
            [
                torch.tensor([[float(recording.sum()), filled]]).expand(int(num_rows), 2)
                for recording, num_rows in zip(recordings, aftercnn_lens, strict=True)
            ]
        )


def hear(*lengths: int) -> tuple[tuple[torch.Tensor, ...], int]:
    """Recording `i` is `lengths[i]` frames of `i + 1`."""
    thinker: Any = object.__new__(Thinker)
    nn.Module.__init__(thinker)
    thinker.audio_tower = Tower()
    features = torch.cat([torch.full((2, n), i + 1.0) for i, n in enumerate(lengths)], dim=1)
    heard = thinker._process_audio_input(
        {"input_features": features, "audio_feature_lengths": torch.tensor(lengths)}
    )
    return heard, thinker.audio_tower.num_forwards


def test_a_short_recording_is_filled_up_as_it_is_alone_and_keeps_its_place() -> None:
    lengths = (150, 10, 400, 37, 10)
    together, _ = hear(*lengths)

    for index, (length, rows) in enumerate(zip(lengths, together, strict=True)):
        ((alone,), _) = hear(length)
        assert rows.shape == alone.shape
        assert rows[0].tolist() == [2 * length * (index + 1), min(length, PART)]


def test_those_that_are_filled_up_alike_share_a_forward() -> None:
    assert hear(150, 100, 2000)[1] == 1
    assert hear(10, 10)[1] == 1
    assert hear(150, 10, 400, 10)[1] == 2
