"""Sizes and ids of the released 7B checkpoint, as far as its configuration is known.

Used to write configurations without weights, and scaled down for tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SPECIAL_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|vision_pad|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)

TOKEN_ROLES: Final[Mapping[str, str]] = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}

PLACEHOLDERS: Final[Mapping[str, str]] = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
}

DEFAULT_SYSTEM: Final = "You are a helpful assistant."

SPEAKERS: Final[Mapping[str, int]] = {"Ethan": 151_870, "Chelsie": 151_872}
"""Each voice and the text token that opens its speech."""

_MEDIA_IDS: Final[Mapping[str, int]] = {
    "audio_token_index": 151646,
    "image_token_index": 151655,
    "video_token_index": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "audio_start_token_id": 151647,
    "audio_end_token_id": 151648,
    "position_id_per_seconds": 25,
    "seconds_per_chunk": 2,
}

_ROPE: Final[Mapping[str, Any]] = {
    "rope_type": "default",
    "rope_theta": 1_000_000.0,
    "mrope_section": [16, 24, 24],
}

_THINKER: Final[Mapping[str, Any]] = {
    **_MEDIA_IDS,
    "user_token_id": 872,
    "text_config": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_parameters": _ROPE,
        "tie_word_embeddings": False,
    },
    "audio_config": {"num_mel_bins": 128, "output_dim": 3584},
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
    },
}

_TALKER: Final[Mapping[str, Any]] = {
    **_MEDIA_IDS,
    "vocab_size": 8448,
    "embedding_size": 3584,
    "hidden_size": 896,
    "intermediate_size": 18_944,
    "num_hidden_layers": 24,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rope_parameters": _ROPE,
}

_TOKEN2WAV: Final[Mapping[str, Any]] = {"dit_config": {}, "bigvgan_config": {}}
"""The defaults of the configuration classes."""

RELEASED: Final[Mapping[str, Any]] = {
    "architectures": ["Qwen2_5OmniForConditionalGeneration"],
    "dtype": "bfloat16",
    "enable_audio_output": True,
    "thinker_config": _THINKER,
    "talker_config": _TALKER,
    "token2wav_config": _TOKEN2WAV,
}
