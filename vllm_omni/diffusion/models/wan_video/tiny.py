"""Tiny random Wan checkpoints of every kind that has been released."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from vllm_omni.diffusion.models.tiny_parts import enliven, seeded, t5_encoder, t5_tokenizer

VARIANTS: Final = ("t2v_2_1", "i2v_2_1", "t2v_2_2", "i2v_2_2", "ti2v_2_2")


def make_tiny(out_dir: Path, seed: int = 0, variant: str = "t2v_2_1") -> Path:
    """Write the whole checkpoint; the same seed gives the same weights.

    2.1 has one denoiser, and CLIP sees the picture; 2.2 has a second denoiser for the steps with
    little noise; `ti2v` is the small 2.2, where each latent has its own timestep.
    """
    from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline

    takes_image = variant.startswith("i2v")
    has_two = variant in ("t2v_2_2", "i2v_2_2")
    tokenizer = t5_tokenizer()
    with seeded(seed):
        parts: dict[str, Any] = {
            "tokenizer": tokenizer,
            "text_encoder": t5_encoder(tokenizer, is_umt5=True),
            "vae": _vae(),
            "scheduler": UniPCMultistepScheduler(
                prediction_type="flow_prediction",
                use_flow_sigmas=True,
                num_train_timesteps=1000,
                flow_shift=3.0,
            ),
            "transformer": _transformer(takes_image, sees_image=variant == "i2v_2_1"),
        }
        if has_two:
            parts |= {
                "transformer_2": _transformer(takes_image, sees_image=False),
                "boundary_ratio": 0.875 if variant == "t2v_2_2" else 0.9,
            }
        if variant == "i2v_2_1":
            parts |= _image_encoder()
    if variant == "ti2v_2_2":
        parts["expand_timesteps"] = True
    for name in ("transformer", "transformer_2", "vae"):
        if name in parts:
            enliven(parts[name], 2.0 if name == "vae" else 1.5)
    pipeline_class = WanImageToVideoPipeline if takes_image else WanPipeline
    pipeline_class(**parts).save_pretrained(out_dir)
    return out_dir


def _transformer(takes_image: bool, sees_image: bool) -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        # Latents, four masks of frames, latents of the picture.
        in_channels=12 if takes_image else 4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=128,
        image_dim=32 if sees_image else None,
        added_kv_proj_dim=24 if sees_image else None,
    )


def _vae() -> Any:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.0, 0.3],
        latents_std=[1.1, 0.9, 1.0, 1.2],
    )


def _image_encoder() -> dict[str, Any]:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    size = {"height": 32, "width": 32}
    return {
        "image_encoder": CLIPVisionModel(config).eval(),
        "image_processor": CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size),
    }
