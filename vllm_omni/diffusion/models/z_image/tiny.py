"""A tiny random Z-Image checkpoint."""

from __future__ import annotations

from pathlib import Path

from vllm_omni.diffusion.models.tiny_parts import chat_tokenizer, enliven, kl_vae, seeded


def make_tiny(out_dir: Path, seed: int = 0) -> Path:
    """Write the whole checkpoint; the same seed gives the same weights."""
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        ZImagePipeline,
        ZImageTransformer2DModel,
    )
    from transformers import Qwen2TokenizerFast, Qwen3Config, Qwen3Model

    tokenizer = chat_tokenizer(Qwen2TokenizerFast)
    with seeded(seed):
        text_encoder = Qwen3Model(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                max_position_embeddings=1024,
                initializer_range=0.2,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
            )
        ).eval()
        transformer = ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=32,
            axes_dims=[4, 6, 6],
            axes_lens=[1024, 256, 256],
        )
        with torch.no_grad():
            transformer.x_pad_token.normal_(std=0.1)
            transformer.cap_pad_token.normal_(std=0.1)
        pipeline = ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=kl_vae(latent_channels=4),
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            transformer=transformer,
        )
    enliven(pipeline.transformer, 2.0)
    enliven(pipeline.vae, 2.0)
    pipeline.save_pretrained(out_dir)
    return out_dir
