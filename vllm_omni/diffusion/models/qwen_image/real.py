"""Qwen-Image at its released size, without weights: 20.4 billion parameters and a 7B encoder."""

from __future__ import annotations

from pathlib import Path

from vllm_omni.diffusion.models.tiny_parts import chat_tokenizer, save_without_weights


def make_real(out_dir: Path) -> Path:
    """Write the folder; its stage needs `load_format: dummy`."""
    import torch
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2TokenizerFast,
    )

    text_config = {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1_000_000.0,
            "mrope_section": [16, 24, 24],
        },
    }
    vision_config = {"hidden_size": 1280, "out_hidden_size": 3584, "depth": 32, "num_heads": 16}
    with torch.device("meta"):
        text_encoder = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text_config, vision_config=vision_config)
        )
        transformer = QwenImageTransformer2DModel()
        vae = AutoencoderKLQwenImage()
    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
            use_dynamic_shifting=True,
        ),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=chat_tokenizer(Qwen2TokenizerFast),
        transformer=transformer,
    )
    return save_without_weights(pipeline, out_dir)
