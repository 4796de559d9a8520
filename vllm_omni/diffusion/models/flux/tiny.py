"""Tiny random FLUX.1 checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from vllm_omni.diffusion.models.tiny_parts import (
    clip_text_encoder,
    clip_tokenizer,
    enliven,
    kl_vae,
    seeded,
    t5_encoder,
    t5_tokenizer,
)

VARIANTS: Final = ("dev", "schnell")


def make_tiny(out_dir: Path, seed: int = 0, variant: str = "dev") -> Path:
    """Write the whole checkpoint; the same seed gives the same weights."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    is_dev = variant == "dev"
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    with seeded(seed):
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=is_dev,
            axes_dims_rope=(4, 4, 8),
        )
        pipeline = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=3.0 if is_dev else 1.0, use_dynamic_shifting=is_dev
            ),
            vae=kl_vae(latent_channels=4),
            text_encoder=clip_text_encoder(clip),
            tokenizer=clip,
            text_encoder_2=t5_encoder(t5),
            tokenizer_2=t5,
            transformer=transformer,
        )
    enliven(pipeline.transformer, 2.0)
    enliven(pipeline.vae, 2.0)
    pipeline.save_pretrained(out_dir)
    return out_dir
