"""Checkpoints of this family made from the reference classes: tiny ones with random weights, and
the released sizes without weights. Same layout and names of weights as the released ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_omni.model_executor.models.common.qwen_tokenizer import build_tokenizer, chat_template
from vllm_omni.model_executor.models.common.tiny_checkpoint import (
    merged,
    seeded,
    speech_feature_extractor,
    spread_weights,
    vision_processors,
    write_generation_config,
)
from vllm_omni.model_executor.models.qwen3_omni.released import (
    PLACEHOLDERS,
    RELEASED,
    SPECIAL_TOKENS,
    TOKEN_ROLES,
)

if TYPE_CHECKING:
    from transformers import Qwen3OmniMoeConfig

_ROPE: Final = {"mrope_section": [6, 5, 5]}
_INIT: Final = {"initializer_range": 0.2}

TINY: Final[Mapping[str, Any]] = {
    "dtype": "float32",
    "thinker_config": {
        "text_config": {
            **_INIT,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 8192,
            "rope_parameters": _ROPE,
            "moe_intermediate_size": 64,
            "num_experts_per_tok": 2,
            "num_experts": 4,
        },
        "audio_config": {
            **_INIT,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "output_dim": 64,
            "downsample_hidden_size": 32,
        },
        "vision_config": {
            **_INIT,
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "talker_config": {
        # After those that the vision tower feeds, as in the released sizes: of the last of these
        # transformers gives the talker the state without what was added, vLLM with it.
        "accept_hidden_layer": 3,
        "thinker_hidden_size": 64,
        **_INIT,
        "text_config": {
            **_INIT,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 8192,
            "rope_parameters": _ROPE,
            "moe_intermediate_size": 64,
            "num_experts_per_tok": 2,
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
        },
        "code_predictor_config": {
            **_INIT,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 64,
        },
    },
    "code2wav_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "decoder_dim": 64,
        "sliding_window": 8,
    },
}


def make_tiny(out_dir: Path, seed: int = 0, *, thinking: bool = False) -> Path:
    """Write a random checkpoint of about 100 MB, nearly all of it vocabulary.

    Args:
        thinking: without talker and vocoder, as the Thinking checkpoints are.
    """
    from transformers import Qwen3OmniMoeForConditionalGeneration

    config = _config(merged(RELEASED, TINY) | {"enable_audio_output": not thinking})
    with seeded(seed):
        model = Qwen3OmniMoeForConditionalGeneration(config)
        if not thinking:
            spread_weights(model.code2wav, gain=0.7)
            _fill_experts(model.talker)
    model.save_pretrained(out_dir)
    # Random weights seldom choose the end token: bound what a request without a limit writes.
    _write_rest(out_dir, config, {"max_new_tokens": 64})
    return out_dir


def _fill_experts(talker: Any) -> None:
    """The reference class leaves the memory of the talker's experts as it found it."""
    import torch

    with torch.no_grad():
        for parameter in talker.parameters():
            if parameter.ndim == 3:  # all experts of a layer in one
                parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))


def make_real(out_dir: Path) -> Path:
    """Write what the released 30B-A3B checkpoints have, except weights."""
    config = _config(RELEASED)
    out_dir.mkdir(parents=True, exist_ok=True)
    _write_rest(out_dir, config, {})
    return out_dir


def _config(values: Mapping[str, Any]) -> Qwen3OmniMoeConfig:
    from transformers import Qwen3OmniMoeConfig

    return Qwen3OmniMoeConfig(**values)


def _write_rest(out_dir: Path, config: Qwen3OmniMoeConfig, generation: Mapping[str, Any]) -> None:
    """Everything but the weights."""
    from transformers import Qwen3OmniMoeProcessor

    tokenizer = build_tokenizer(SPECIAL_TOKENS, TOKEN_ROLES, chat_template(PLACEHOLDERS))
    images, videos = vision_processors(16)
    processor = Qwen3OmniMoeProcessor(
        image_processor=images,
        video_processor=videos,
        feature_extractor=speech_feature_extractor(),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    config.save_pretrained(out_dir)
    processor.save_pretrained(out_dir)
    write_generation_config(out_dir, tokenizer, generation)
