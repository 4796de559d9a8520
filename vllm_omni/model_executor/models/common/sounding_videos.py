"""Videos that are heard too, beside audio of its own in one prompt, for vLLM's omni thinkers.

vLLM pairs the i-th video with the i-th audio item and refuses further audio. Here items pair by
their place: audio items are given in the order of the prompt, a video's sound in its video's place,
as the reference takes them. Runs in the API process (`SoundingVideos`) and in the thinker's
replica (`SoundingThinker`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerMultiModalProcessor
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import PromptReplacement, PromptUpdateDetails
from vllm.multimodal.processing.processor import (
    MultiModalProcessingResult,
    PlaceholderFeaturesInfo,
)
from vllm.multimodal.utils import get_mm_embedding_modalities, set_mm_embedding_modality

Placeholders = Mapping[str, list[PlaceholderFeaturesInfo]]


def sounds_and_own(
    prompt: Iterable[int], audio_token: int, video_token: int
) -> tuple[list[int], list[int]]:
    """Which audio items are the sounds of the videos, and which stand for themselves."""
    marks = [token for token in prompt if token in (audio_token, video_token)]
    sounds = [i for i, token in enumerate(marks) if token == video_token]
    return sounds, [i for i, token in enumerate(marks) if token == audio_token]


class SoundingVideos(Qwen2_5OmniThinkerMultiModalProcessor):  # type: ignore[misc]
    """A processor that knows the place of every sound. Base of the families' own."""

    def _num_audio_tokens(self, num_frames: int) -> int:
        """Positions that an audio item of so many spectrogram frames takes."""
        raise NotImplementedError

    def _interleaved(self, num_audio_tokens: int, grid: torch.Tensor, seconds: float) -> list[int]:
        """Tokens of a video and its sound, by time."""
        raise NotImplementedError

    def _maybe_apply_prompt_updates(
        self, mm_items: MultiModalDataItems, mm_res: MultiModalProcessingResult
    ) -> tuple[list[int], Placeholders]:
        videos = mm_res.kwargs.get("video", ())
        if not videos or any(video is None for video in videos):
            return super()._maybe_apply_prompt_updates(mm_items, mm_res)
        if not bool(videos[0]["use_audio_in_video"].data):
            return super()._maybe_apply_prompt_updates(mm_items, mm_res)
        counts = mm_items.get_all_counts()
        self._validate_mm_kwargs(mm_res.kwargs, counts)
        config = self.info.get_hf_config()
        audio_token, video_token = _media_tokens(config)
        sounds, own = sounds_and_own(mm_res.prompt_ids, audio_token, video_token)
        if len(sounds) != len(videos) or len(sounds) + len(own) != counts.get("audio", 0):
            raise ValueError(
                f"the prompt has {len(sounds)} places for videos with sound and {len(own)} for "
                f"audio; given are {len(videos)} videos and {counts.get('audio', 0)} audio items, "
                "of which each video needs one"
            )
        lengths = [
            self._num_audio_tokens(int(item["audio_feature_lengths"].data))
            for item in mm_res.kwargs.get("audio", ())
        ]
        replacements = [
            PromptReplacement("audio", [audio_token], lambda i: [audio_token] * lengths[own[i]]),
            PromptReplacement(
                "video",
                [video_token],
                lambda i: PromptUpdateDetails.select_token_id(
                    self._interleaved(
                        lengths[sounds[i]],
                        videos[i]["video_grid_thw"].data,
                        float(videos[i]["second_per_grid_ts"].data),
                    ),
                    video_token,
                ),
            ),
        ]
        updates = self._bind_and_group_updates(
            replacements, {"audio": len(own), "video": len(videos)}
        )
        rest = {name: u for name, u in mm_res.prompt_updates.items() if name not in updates}
        prompt_ids, found = self._apply_prompt_updates(mm_res.prompt_ids, {**rest, **updates})
        placed = _with_sounds(found, sounds, own, audio_token)
        self._validate_mm_placeholders(placed, counts)
        return prompt_ids, placed


def _media_tokens(config: Any) -> tuple[int, int]:
    """Token ids of audio and video; older configs call them an index."""
    if "audio_token_index" in config.to_dict():
        return config.audio_token_index, config.video_token_index
    return config.audio_token_id, config.video_token_id


def _with_sounds(
    found: Placeholders, sounds: Sequence[int], own: Sequence[int], audio_token: int
) -> Placeholders:
    """Placeholders of all audio items by their index; a sound shares its video's span."""
    audio = {
        own[place.item_idx]: PlaceholderFeaturesInfo(
            "audio", own[place.item_idx], place.start_idx, place.tokens, place.is_embed
        )
        for place in found.get("audio", ())
    }
    for place in found.get("video", ()):
        item = sounds[place.item_idx]
        heard = torch.tensor(place.tokens) == audio_token
        audio[item] = PlaceholderFeaturesInfo("audio", item, place.start_idx, place.tokens, heard)
    return {**found, "audio": [audio[item] for item in sorted(audio)]}


class SoundingThinker:
    """Mixed in before a thinker of vLLM: a video's sound is the audio item in the same span."""

    config: Any

    def _get_audio_for_video_mapping(
        self, mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[dict[int, int], set[int]]:
        lengths = {
            feature.mm_position.offset: int(feature.data["audio_feature_lengths"].data)
            for feature in mm_features
            if feature.modality == "audio" and feature.data is not None
        }
        videos = (f.mm_position.offset for f in mm_features if f.modality == "video")
        mapping = {offset: lengths[offset] for offset in videos if offset in lengths}
        return mapping, set(mapping)

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if multimodal_embeddings is not None and len(multimodal_embeddings) > 1:
            assert is_multimodal is not None, "embeddings come with their places"
            audio_token, _ = _media_tokens(self.config)
            is_audio = input_ids.cpu() == audio_token
            multimodal_embeddings = in_order(
                multimodal_embeddings, is_audio[is_multimodal.cpu()].tolist()
            )
        embedded: torch.Tensor = super().embed_input_ids(  # type: ignore[misc]
            input_ids, multimodal_embeddings, is_multimodal=is_multimodal
        )
        return embedded


def in_order(embeddings: Sequence[torch.Tensor], is_audio: Sequence[bool]) -> list[torch.Tensor]:
    """Embeddings cut and sorted as their positions follow each other.

    vLLM fills positions one after the other unless it sees both kinds alternate. A step of a
    chunked prefill may hold just the end of a sound and the begin of its video's next picture.

    Args:
        embeddings: of the items of one step, each with its modality.
        is_audio: for each position that is filled, whether audio fills it.
    """
    kinds = get_mm_embedding_modalities(embeddings)
    if "audio" not in kinds or all(kind == "audio" for kind in kinds):
        return list(embeddings)
    rows: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for kind, embedding in zip(kinds, embeddings, strict=True):
        rows[kind == "audio"].append(embedding)
    taken = {True: 0, False: 0}
    pieces: list[torch.Tensor] = []
    start = 0
    while start < len(is_audio):
        kind = is_audio[start]
        end = start
        while end < len(is_audio) and is_audio[end] == kind:
            end += 1
        pieces += _take(rows[kind], taken[kind], taken[kind] + end - start)
        taken[kind] += end - start
        start = end
    return pieces


def _take(embeddings: Sequence[torch.Tensor], start: int, end: int) -> list[torch.Tensor]:
    """Rows `start` to `end` of all of them, item by item."""
    pieces, first = [], 0
    for embedding in embeddings:
        last = first + len(embedding)
        if first < end and start < last:
            piece = embedding[max(start - first, 0) : end - first]
            pieces.append(set_mm_embedding_modality(piece, embedding.modality))
        first = last
    return pieces
