"""A tiny random Stable Diffusion 3.5 checkpoint."""

from __future__ import annotations

from pathlib import Path

from vllm_omni.diffusion.models.tiny_parts import (
    clip_text_encoder,
    clip_tokenizer,
    enliven,
    kl_vae,
    seeded,
    t5_encoder,
    t5_tokenizer,
)


def make_tiny(out_dir: Path, seed: int = 0) -> Path:
    """Write the whole checkpoint; the same seed gives the same weights."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    with seeded(seed):
        transformer = SD3Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=64,
            caption_projection_dim=32,
            pooled_projection_dim=64,
            pos_embed_max_size=96,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        pipeline = StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=kl_vae(latent_channels=4),
            text_encoder=clip_text_encoder(clip, projects=True),
            tokenizer=clip,
            text_encoder_2=clip_text_encoder(clip, projects=True),
            tokenizer_2=clip,
            text_encoder_3=t5_encoder(t5, width=64),
            tokenizer_3=t5,
        )
    enliven(pipeline.transformer, 1.5)
    enliven(pipeline.vae, 2.0)
    pipeline.save_pretrained(out_dir)
    return out_dir
