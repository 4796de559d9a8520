"""vLLM's thinker of Qwen3-Omni with audio as the reference hears it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from transformers import BatchFeature
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerMultiModalProcessor
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerDummyInputsBuilder,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerMultiModalProcessor,
    Qwen3OmniMoeThinkerProcessingInfo,
    _get_feat_extract_output_lengths,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.parse import MultiModalDataItems

from vllm_omni.model_executor.models.common.sounding_videos import SoundingThinker, SoundingVideos


class Qwen3OmniProcessor(SoundingVideos, Qwen3OmniMoeThinkerMultiModalProcessor):  # type: ignore[misc]
    """Audio goes to the feature extractor as long as it is.

    vLLM fills it up to a whole number of frames for the sake of its cache between processes, which
    is off here; the last frames, sometimes their number, would not be the reference's.
    """

    def _get_hf_mm_inputs(
        self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]
    ) -> Any:
        return Qwen2_5OmniThinkerMultiModalProcessor._get_hf_mm_inputs(self, mm_items, hf_kwargs)

    def _postprocess_hf_mm_data(
        self,
        mm_data: Mapping[str, object],
        hf_processor_mm_kwargs: Mapping[str, object],
        processed_data: BatchFeature,
    ) -> BatchFeature:
        return Qwen2_5OmniThinkerMultiModalProcessor._postprocess_hf_mm_data(
            self, mm_data, hf_processor_mm_kwargs, processed_data
        )

    def _num_audio_tokens(self, num_frames: int) -> int:
        return int(_get_feat_extract_output_lengths(torch.tensor(num_frames)))

    def _interleaved(self, num_audio_tokens: int, grid: torch.Tensor, seconds: float) -> list[int]:
        tokens: list[int] = self.get_updates_use_audio_in_video(
            self.info.get_hf_config(), num_audio_tokens, grid, seconds
        )
        return tokens


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3OmniProcessor,
    info=Qwen3OmniMoeThinkerProcessingInfo,
    dummy_inputs=Qwen3OmniMoeThinkerDummyInputsBuilder,
)
class Thinker(SoundingThinker, Qwen3OmniMoeThinkerForConditionalGeneration):  # type: ignore[misc]
    """Loads the released checkpoints by their names, as vLLM's class does."""

    def _process_audio_input(self, audio_input: Any) -> tuple[torch.Tensor, ...]:
        """Recordings that come together are heard as each is alone.

        The audio tower fills the parts that it cuts them into up to the longest of its batch, and
        convolutions carry what lies behind a recording's end into its last frames. Of a recording
        with several parts the end is filled up alone too, but not of one that is a single part.
        """
        lengths = audio_input["audio_feature_lengths"].tolist()
        part = 2 * self.audio_tower.n_window
        alike: dict[int, list[int]] = defaultdict(list)
        for index, length in enumerate(lengths):
            alike[min(length, part)].append(index)
        if len(alike) == 1:
            whole: tuple[torch.Tensor, ...] = super()._process_audio_input(audio_input)
            return whole
        features = audio_input["input_features"].split(lengths, dim=1)
        heard: dict[int, torch.Tensor] = {}
        for indices in alike.values():
            batch = {
                "input_features": torch.cat([features[index] for index in indices], dim=1),
                "audio_feature_lengths": torch.tensor([lengths[index] for index in indices]),
            }
            heard |= zip(indices, super()._process_audio_input(batch), strict=True)
        return tuple(heard[index] for index in range(len(lengths)))
