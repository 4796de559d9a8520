"""A tiny random GLM-Image checkpoint: autoregressive model and denoiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from vllm_omni.diffusion.models.tiny_parts import enliven, kl_vae, seeded, t5_encoder, trained_bpe

NUM_CODES: Final = 64
"""Image tokens; their ids are the first, then come those that begin and end a picture."""
IMAGE_SPECIALS: Final = (
    *(f"<|dit_token_{i}|>" for i in range(NUM_CODES)),
    "<|dit_token_16384|>",
    "<|dit_token_16385|>",
    "<|endoftext|>",
    "<|image|>",
    "<sop>",
    "<eop>",
)
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def make_tiny(out_dir: Path, seed: int = 0) -> Path:
    """Write the whole checkpoint; the same seed gives the same weights."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        GlmImagePipeline,
        GlmImageTransformer2DModel,
    )
    from transformers import ByT5Tokenizer

    glyph_tokenizer = ByT5Tokenizer()
    tokenizer = _tokenizer()
    with seeded(seed):
        transformer = GlmImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=32,
            time_embed_dim=32,
            condition_dim=8,
            prior_vq_quantizer_codebook_size=NUM_CODES,
        )
        pipeline = GlmImagePipeline(
            tokenizer=glyph_tokenizer,
            processor=_processor(tokenizer),
            text_encoder=t5_encoder(glyph_tokenizer),
            vision_language_encoder=_writer(tokenizer),
            vae=kl_vae(
                latent_channels=4,
                latents_mean=[0.1, -0.2, 0.0, 0.3],
                latents_std=[1.1, 0.9, 1.0, 1.2],
            ),
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(
                base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True, time_shift_type="linear"
            ),
        )
    enliven(pipeline.transformer, 1.5)
    enliven(pipeline.vae, 2.0)
    pipeline.save_pretrained(out_dir)
    return out_dir


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=trained_bpe(IMAGE_SPECIALS, vocab_size=384),
        bos_token="<|dit_token_16384|>",
        eos_token="<|dit_token_16385|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        extra_special_tokens={
            "image_token": "<|image|>",
            "grid_bos_token": "<sop>",
            "grid_eos_token": "<eop>",
        },
        chat_template=CHAT_TEMPLATE,
    )


def _processor(tokenizer: Any) -> Any:
    from transformers import GlmImageImageProcessor, GlmImageProcessor

    return GlmImageProcessor(
        image_processor=GlmImageImageProcessor(patch_size=32, merge_size=1),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


def _writer(tokenizer: Any) -> Any:
    from transformers import GenerationConfig, GlmImageConfig, GlmImageForConditionalGeneration

    token_id = tokenizer.convert_tokens_to_ids
    config = GlmImageConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "vision_vocab_size": NUM_CODES + 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 16384,
            "initializer_range": 0.2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 6, 6],
            },
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "image_size": 128,
        },
        vq_config={"embed_dim": 16, "num_embeddings": NUM_CODES, "latent_channels": 32},
        image_token_id=token_id("<|image|>"),
        image_start_token_id=token_id("<|dit_token_16384|>"),
        image_end_token_id=token_id("<|dit_token_16385|>"),
    )
    model = GlmImageForConditionalGeneration(config).eval()
    model.generation_config = GenerationConfig(
        do_sample=True,
        # Random weights would end the picture before it is whole.
        suppress_tokens=[tokenizer.bos_token_id, tokenizer.eos_token_id],
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model
