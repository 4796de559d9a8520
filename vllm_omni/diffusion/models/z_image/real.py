"""Z-Image at its released size, without weights: 6.2 billion parameters and a 4B encoder."""

from __future__ import annotations

from pathlib import Path

from vllm_omni.diffusion.models.tiny_parts import chat_tokenizer, kl_vae_16, save_without_weights


def make_real(out_dir: Path) -> Path:
    """Write the folder; its stage needs `load_format: dummy`."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
    from transformers import Qwen2TokenizerFast, Qwen3Config, Qwen3Model

    encoder_config = Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    with torch.device("meta"):
        pipeline = ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=kl_vae_16(),
            text_encoder=Qwen3Model(encoder_config),
            tokenizer=chat_tokenizer(Qwen2TokenizerFast),
            transformer=ZImageTransformer2DModel(),
        )
    return save_without_weights(pipeline, out_dir)
