"""Checkpoints of this family made from the reference classes: tiny ones with random weights, and
the released sizes without weights. Same layout and names of weights as the released ones.
"""

from __future__ import annotations

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
from vllm_omni.model_executor.models.qwen2_5_omni.released import (
    DEFAULT_SYSTEM,
    PLACEHOLDERS,
    RELEASED,
    SPEAKERS,
    SPECIAL_TOKENS,
    TOKEN_ROLES,
)

if TYPE_CHECKING:
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

_ROPE: Final = {"mrope_section": [4, 6, 6]}
_INIT: Final = {"initializer_range": 0.2}

TINY: Final[Mapping[str, Any]] = {
    "dtype": "float32",
    "thinker_config": {
        "text_config": {
            **_INIT,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 8192,
            "rope_parameters": _ROPE,
        },
        "audio_config": {
            **_INIT,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "output_dim": 64,
        },
        "vision_config": {
            **_INIT,
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
    },
    "talker_config": {
        **_INIT,
        "embedding_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "rope_parameters": _ROPE,
    },
    "token2wav_config": {
        "dit_config": {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "head_dim": 32,
            "emb_dim": 32,
            "look_ahead_layers": [1],
            "look_backward_layers": [0, 2],
            "enc_dim": 32,
            "enc_channels": [32, 32, 32, 32, 96],
            "enc_attention_channels": 16,
            "enc_se_channels": 16,
        },
        "bigvgan_config": {
            "upsample_initial_channel": 128,
            "resblock_kernel_sizes": [3],
            "resblock_dilation_sizes": [[1, 3, 5]],
        },
    },
}


def make_tiny(out_dir: Path, seed: int = 0) -> Path:
    """Write a random checkpoint of about 90 MB, nearly all of it vocabulary."""
    from transformers import Qwen2_5OmniForConditionalGeneration

    config = _config(merged(RELEASED, TINY))
    with seeded(seed):
        model = Qwen2_5OmniForConditionalGeneration(config)
        spread_weights(model.token2wav.code2wav_dit_model)
        spread_weights(model.token2wav.code2wav_bigvgan_model, gain=0.8)
        _keep_to_the_codebook(model, config)
        model.save_pretrained(out_dir)
        write_speakers(out_dir, config, mel_frames=40)
    # Random weights seldom choose the end token: bound what a request without a limit writes.
    _write_rest(out_dir, config, {"max_new_tokens": 64})
    return out_dir


def make_real(out_dir: Path) -> Path:
    """Write what the released 7B checkpoint has, except weights; its voices are random."""
    config = _config(RELEASED)
    out_dir.mkdir(parents=True, exist_ok=True)
    with seeded(0):
        write_speakers(out_dir, config, mel_frames=300)
    _write_rest(out_dir, config, {})
    return out_dir


def write_speakers(out_dir: Path, config: Qwen2_5OmniConfig, mel_frames: int) -> None:
    """Random voices, in the form of the released ones."""
    import torch

    dit = config.token2wav_config.dit_config
    speakers = {
        name: {
            "cond": torch.randn(1, dit.enc_emb_dim),
            "ref_mel": torch.randn(1, mel_frames, dit.mel_dim),
            "bos_token": token,
        }
        for name, token in SPEAKERS.items()
    }
    torch.save(speakers, out_dir / "spk_dict.pt")


def _keep_to_the_codebook(model: Qwen2_5OmniForConditionalGeneration, config: Any) -> None:
    """A trained talker writes codes that the vocoder has, or its end; so does this one."""
    import torch

    talker = config.talker_config
    ends = [talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id]
    with torch.no_grad():
        rows = model.talker.codec_head.weight
        kept = rows[ends].clone()
        rows[config.token2wav_config.dit_config.num_embeds :] = 0.0
        rows[ends] = kept


def _config(values: Mapping[str, Any]) -> Qwen2_5OmniConfig:
    from transformers import Qwen2_5OmniConfig

    return Qwen2_5OmniConfig(**values)


def _write_rest(out_dir: Path, config: Qwen2_5OmniConfig, generation: Mapping[str, Any]) -> None:
    """Everything but the weights."""
    from transformers import Qwen2_5OmniProcessor

    template = chat_template(PLACEHOLDERS, DEFAULT_SYSTEM)
    tokenizer = build_tokenizer(SPECIAL_TOKENS, TOKEN_ROLES, template)
    images, videos = vision_processors(14)
    processor = Qwen2_5OmniProcessor(
        image_processor=images,
        video_processor=videos,
        feature_extractor=speech_feature_extractor(),
        tokenizer=tokenizer,
        chat_template=template,
    )
    config.save_pretrained(out_dir)
    processor.save_pretrained(out_dir)
    write_generation_config(out_dir, tokenizer, generation)
