"""Wan 2.1 text to video, 1.3B, at its released size, without weights."""

from __future__ import annotations

from pathlib import Path

from vllm_omni.diffusion.models.tiny_parts import save_without_weights, t5_tokenizer, t5_xxl


def make_real(out_dir: Path) -> Path:
    """Write the folder; its stage needs `load_format: dummy`."""
    import torch
    from diffusers import (
        AutoencoderKLWan,
        UniPCMultistepScheduler,
        WanPipeline,
        WanTransformer3DModel,
    )

    with torch.device("meta"):
        pipeline = WanPipeline(
            tokenizer=t5_tokenizer(),
            text_encoder=t5_xxl(is_umt5=True),
            vae=AutoencoderKLWan(),
            scheduler=UniPCMultistepScheduler(
                prediction_type="flow_prediction",
                use_flow_sigmas=True,
                num_train_timesteps=1000,
                flow_shift=3.0,
            ),
            transformer=WanTransformer3DModel(
                num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=30
            ),
        )
    return save_without_weights(pipeline, out_dir)
