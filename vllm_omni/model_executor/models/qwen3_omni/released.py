"""Sizes and ids of the released 30B-A3B checkpoints, as far as their configuration is known.

Used to write configurations without weights, and scaled down for tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SPECIAL_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)

TOKEN_ROLES: Final[Mapping[str, str]] = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}

PLACEHOLDERS: Final[Mapping[str, str]] = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}

SPEAKERS: Final[Mapping[str, int]] = {"chelsie": 2301, "ethan": 2302, "aiden": 2303}

_MEDIA_IDS: Final[Mapping[str, int]] = {
    "audio_token_id": 151675,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "audio_start_token_id": 151669,
    "position_id_per_seconds": 13,
    "seconds_per_chunk": 2,
}

_ROPE: Final[Mapping[str, Any]] = {
    "rope_type": "default",
    "rope_theta": 1_000_000,
    "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
    "interleaved": True,
}

_THINKER: Final[Mapping[str, Any]] = {
    **_MEDIA_IDS,
    "vision_end_token_id": 151653,
    "audio_end_token_id": 151670,
    "user_token_id": 872,
    "text_config": {
        "vocab_size": 152_064,
        "hidden_size": 2048,
        "intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 65_536,
        "rope_parameters": _ROPE,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 0,
    },
    "audio_config": {
        "num_mel_bins": 128,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "d_model": 1280,
        "output_dim": 2048,
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "deepstack_visual_indexes": [8, 16, 24],
        "apply_vit_abs_pos_embed": True,
        "image_size": 768,
    },
}

_TALKER: Final[Mapping[str, Any]] = {
    **_MEDIA_IDS,
    "accept_hidden_layer": 24,
    "num_code_groups": 16,
    "thinker_hidden_size": 2048,
    "codec_bos_id": 2149,
    "codec_eos_token_id": 2150,
    "codec_nothink_id": 2155,
    "codec_pad_id": 2148,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
    "speaker_id": SPEAKERS,
    "spatial_merge_size": 2,
    "text_config": {
        "vocab_size": 3072,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 65_536,
        "rope_parameters": _ROPE,
        "moe_intermediate_size": 384,
        "num_experts_per_tok": 6,
        "num_experts": 128,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 768,
    },
    "code_predictor_config": {
        "vocab_size": 2048,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_code_groups": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000},
    },
}

_CODE2WAV: Final[Mapping[str, Any]] = {
    "codebook_size": 2048,
    "codebook_dim": 512,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "decoder_dim": 1536,
    "max_position_embeddings": 8000,
    "num_quantizers": 16,
    "num_semantic_quantizers": 1,
    "semantic_codebook_size": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000},
    "sliding_window": 72,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "vector_quantization_hidden_dimension": 512,
}

RELEASED: Final[Mapping[str, Any]] = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "dtype": "bfloat16",
    "enable_audio_output": True,
    "im_start_token_id": 151644,
    "im_end_token_id": 151645,
    "system_token_id": 8948,
    "user_token_id": 872,
    "assistant_token_id": 77091,
    "tts_pad_token_id": 151671,
    "tts_bos_token_id": 151672,
    "tts_eos_token_id": 151673,
    "thinker_config": _THINKER,
    "talker_config": _TALKER,
    "code2wav_config": _CODE2WAV,
}
