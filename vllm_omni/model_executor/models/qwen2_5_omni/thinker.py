"""vLLM's thinker of Qwen2.5-Omni with the sounds of videos in their places."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec

from vllm_omni.model_executor.models.common.sounding_videos import SoundingThinker, SoundingVideos


class Qwen25OmniProcessor(SoundingVideos):
    """The processor of vLLM's class, with every sound in its place."""

    def _num_audio_tokens(self, num_frames: int) -> int:
        return ((num_frames - 1) // 2 + 1 - 2) // 2 + 1

    def _interleaved(self, num_audio_tokens: int, grid: torch.Tensor, seconds: float) -> list[int]:
        tokens: list[int] = self.omni_get_updates_use_audio_in_video(
            self.info.get_hf_config(), num_audio_tokens, grid, seconds
        )
        return tokens


@MULTIMODAL_REGISTRY.register_processor(
    Qwen25OmniProcessor,
    info=Qwen2_5OmniThinkerProcessingInfo,
    dummy_inputs=Qwen2_5OmniThinkerDummyInputsBuilder,
)
class Thinker(SoundingThinker, Qwen2_5OmniThinkerForConditionalGeneration):  # type: ignore[misc]
    """Loads the released checkpoints by their names, as vLLM's class does."""

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """Positions of a prompt; vLLM's forget the marks around the sound of a video."""
        features = list(self.iter_mm_features(mm_features))
        if not any(data.get("use_audio_in_video") for _, _, data in features):
            return super().get_mrope_input_positions(input_tokens, mm_features)
        tokens = np.array(input_tokens)
        positions = np.empty((3, len(tokens)), dtype=np.int64)
        done, following = 0, 0  # tokens that have their positions, and what the next one's is
        for offset, modality, data in features:
            if modality == "audio":
                continue  # counts on as text does
            positions[:, done:offset] = np.arange(following, following + offset - done)
            following += offset - done
            grid = _grid(data) + following
            if modality == "image":
                done = offset + grid.shape[1]
                positions[:, offset:done] = grid
                following = int(grid.max()) + 1
                continue
            # The begins of the video and of its sound stand at one position, and so do their ends.
            positions[:, offset] = following - 1
            num_heard = self._compute_audio_token_count(data["audio_feature_length"])
            begin, done = offset + 1, offset + 1 + grid.shape[1] + num_heard
            is_sound = tokens[begin:done] == self.config.audio_token_index
            span = positions[:, begin:done]
            span[:, ~is_sound] = grid
            span[:, is_sound] = np.arange(following, following + num_heard)
            # What follows counts on from what came last, be it the sound or the pictures.
            last_run = np.flatnonzero(np.diff(is_sound, prepend=~is_sound[:1]))[-1]
            following = int(span[:, last_run:].max()) + 1
            positions[:, done : done + 2] = following
            done, following = done + 2, following + 1
        positions[:, done:] = np.arange(following, following + max(len(tokens) - done, 0))
        return torch.from_numpy(positions), int(positions.max()) + 1 - len(tokens)


def _grid(data: dict[str, Any]) -> Any:
    """Time, row and column of every patch of pictures."""
    grid = np.indices((data["grid_t"], data["grid_h"], data["grid_w"])).reshape(3, -1)
    grid[0] = (grid[0] * data["t_factor"]).astype(np.int64)
    return grid
