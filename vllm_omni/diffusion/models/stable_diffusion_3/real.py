"""Stable Diffusion 3.5 Large at its released size, without weights: 8.1 billion parameters."""

from __future__ import annotations

from pathlib import Path

from vllm_omni.diffusion.models.tiny_parts import (
    clip_text,
    clip_tokenizer,
    kl_vae_16,
    save_without_weights,
    t5_tokenizer,
    t5_xxl,
)


def make_real(out_dir: Path) -> Path:
    """Write the folder; its stage needs `load_format: dummy`."""
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    clip = clip_tokenizer()
    with torch.device("meta"):
        pipeline = StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(
                sample_size=128,
                num_layers=38,
                num_attention_heads=38,
                caption_projection_dim=2432,
                pos_embed_max_size=192,
                qk_norm="rms_norm",
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=kl_vae_16(),
            text_encoder=clip_text(768, 12, projects=True),
            tokenizer=clip,
            text_encoder_2=clip_text(1280, 32, projects=True),
            tokenizer_2=clip,
            text_encoder_3=t5_xxl(),
            tokenizer_3=t5_tokenizer(),
        )
    return save_without_weights(pipeline, out_dir)
