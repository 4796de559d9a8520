"""FLUX.1-dev at its released size, without weights: 11.9 billion parameters."""

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
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    with torch.device("meta"):
        pipeline = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=kl_vae_16(),
            text_encoder=clip_text(768, 12),
            tokenizer=clip_tokenizer(),
            text_encoder_2=t5_xxl(),
            tokenizer_2=t5_tokenizer(),
            transformer=FluxTransformer2DModel(guidance_embeds=True),
        )
    return save_without_weights(pipeline, out_dir)
