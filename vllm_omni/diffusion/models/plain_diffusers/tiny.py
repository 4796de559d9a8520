"""Tiny random Stable Diffusion checkpoints: diffusers folders that have no family here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from vllm_omni.diffusion.models.tiny_parts import (
    clip_text_encoder,
    clip_tokenizer,
    enliven,
    kl_vae,
    seeded,
)

VARIANTS: Final = ("text_to_image", "inpaint")


def make_tiny(out_dir: Path, seed: int = 0, variant: str = "text_to_image") -> Path:
    """Write the whole checkpoint; the same seed gives the same weights."""
    from diffusers import (
        EulerDiscreteScheduler,
        StableDiffusionInpaintPipeline,
        StableDiffusionPipeline,
    )

    is_inpaint = variant == "inpaint"
    tokenizer = clip_tokenizer()
    with seeded(seed):
        # Latents; to repaint also a mask and the latents of what is kept.
        parts: dict[str, Any] = {
            "unet": _unet(in_channels=9 if is_inpaint else 4),
            "vae": kl_vae(latent_channels=4),
            "text_encoder": clip_text_encoder(tokenizer),
            "tokenizer": tokenizer,
            "scheduler": EulerDiscreteScheduler(
                beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"
            ),
            "safety_checker": None,
            "feature_extractor": None,
        }
    enliven(parts["unet"], 1.5)
    enliven(parts["vae"], 2.0)
    kind = StableDiffusionInpaintPipeline if is_inpaint else StableDiffusionPipeline
    kind(**parts, requires_safety_checker=False).save_pretrained(out_dir)
    return out_dir


def _unet(in_channels: int) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        in_channels=in_channels,
        out_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
    )
