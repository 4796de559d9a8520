"""Parts of tiny random diffusion checkpoints that several families share.

All are the reference classes at sizes that load and run in seconds on a CPU. Tokenizers are trained
here on a few lines: nothing is downloaded.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

CORPUS: Final = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial",
    "relationships of the objects and background: system user assistant",
    "A red fox jumps over a lazy dog, blue sky, oil painting, four small houses by the sea.",
    "blurry, low quality, a photo of a cat that holds a sign, turn the house green",
)
CHAT_SPECIALS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's random numbers from a seed inside, as they were afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def chat_tokenizer(tokenizer_class: Any) -> Any:
    """A byte-level BPE with special tokens of chats and pictures, and a chat template."""
    return tokenizer_class(
        tokenizer_object=trained_bpe(CHAT_SPECIALS),
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(CHAT_SPECIALS[1:]),
        chat_template=CHAT_TEMPLATE,
    )


def trained_bpe(specials: Sequence[str], vocab_size: int = 320) -> Tokenizer:
    """A byte-level BPE; ids of the special tokens come first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def enliven(module: Any, gain: float) -> None:
    """Multiply the weights, so that what goes in is seen in what comes out."""
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(gain)


def t5_tokenizer() -> Any:
    """T5's tokenizer over single characters."""
    from transformers import T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(character, -3.0) for character in string.printable.strip()]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


def t5_encoder(tokenizer: Any, width: int = 32, is_umt5: bool = False) -> Any:
    """A T5 encoder of 2 layers."""
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    config_class = UMT5Config if is_umt5 else T5Config
    config = config_class(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=width // 2,
        d_ff=2 * width,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    return (UMT5EncoderModel if is_umt5 else T5EncoderModel)(config).eval()


def clip_tokenizer() -> Any:
    """CLIP's tokenizer over single bytes."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"{byte}</w>" for byte in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def clip_text_encoder(tokenizer: Any, width: int = 32, projects: bool = False) -> Any:
    """A CLIP text encoder of 2 layers, with its projection or without."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return (CLIPTextModelWithProjection if projects else CLIPTextModel)(config).eval()


def kl_vae(latent_channels: int, **more: Any) -> Any:
    """A KL autoencoder: 8 pixels a latent."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5,
        shift_factor=0.06,
        **more,
    ).eval()


def save_without_weights(pipeline: Any, out_dir: Path) -> Path:
    """Write everything of a pipeline but its weights, for stages with `load_format: dummy`.

    Its modules may be on the device `meta`, where even the largest take no memory.
    """
    import torch

    pipeline.save_config(out_dir)
    for name, part in pipeline.components.items():
        if part is None:
            continue
        if not isinstance(part, torch.nn.Module):
            part.save_pretrained(out_dir / name)
        elif hasattr(part, "save_config"):
            part.save_config(out_dir / name)
        else:
            part.config.save_pretrained(out_dir / name)
    return out_dir


def t5_xxl(is_umt5: bool = False) -> Any:
    """The text encoder of the large models: 4.7 billion parameters (UMT5: 5.7)."""
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    sizes = {
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
    }
    if is_umt5:
        return UMT5EncoderModel(UMT5Config(vocab_size=256384, **sizes))
    return T5EncoderModel(T5Config(vocab_size=32128, **sizes))


def clip_text(width: int, depth: int, projects: bool = False) -> Any:
    """CLIP's text encoder: L is 768 wide and 12 deep, bigG 1280 and 32."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=49408,
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        hidden_act="quick_gelu" if width == 768 else "gelu",
        max_position_embeddings=77,
    )
    return (CLIPTextModelWithProjection if projects else CLIPTextModel)(config)


def kl_vae_16() -> Any:
    """The autoencoder with 16 channels at its released size."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=16,
        sample_size=1024,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        force_upcast=True,
    )
