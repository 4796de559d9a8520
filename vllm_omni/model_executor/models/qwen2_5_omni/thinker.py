"""vLLM's thinker of Qwen2.5-Omni with the sounds of videos in their places."""

from __future__ import annotations

import torch
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

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
