"""Tiny random Qwen-Image and Qwen-Image-Edit checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from vllm_omni.diffusion.models.tiny_parts import chat_tokenizer, enliven, seeded

VARIANTS: Final = ("text_to_image", "edit")


def make_tiny(out_dir: Path, seed: int = 0, variant: str = "text_to_image") -> Path:
    """Write the whole checkpoint; the same seed gives the same weights."""
    from diffusers import QwenImageEditPipeline, QwenImagePipeline

    with seeded(seed):
        parts = _parts()
    enliven(parts["transformer"], 2.0)
    enliven(parts["vae"], 2.0)
    if variant == "edit":
        pipeline = QwenImageEditPipeline(**parts, processor=_processor(parts["tokenizer"]))
    else:
        pipeline = QwenImagePipeline(**parts)
    pipeline.save_pretrained(out_dir)
    return out_dir


def _parts() -> dict[str, Any]:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2TokenizerFast

    tokenizer = chat_tokenizer(Qwen2TokenizerFast)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=32,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=4,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.0, 0.3],
        latents_std=[1.1, 0.9, 1.0, 1.2],
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift=1.0,
        shift_terminal=0.02,
        use_dynamic_shifting=True,
        time_shift_type="exponential",
    )
    return {
        "scheduler": scheduler,
        "vae": vae,
        "text_encoder": _text_encoder(tokenizer),
        "tokenizer": tokenizer,
        "transformer": transformer,
    }


def _text_encoder(tokenizer: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    token_id = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "bos_token_id": token_id("<|im_start|>"),
            "eos_token_id": token_id("<|im_end|>"),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "initializer_range": 0.2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "mrope_section": [2, 3, 3],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.2,
        },
        bos_token_id=token_id("<|im_start|>"),
        eos_token_id=token_id("<|im_end|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def _processor(tokenizer: Any) -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )
