"""Parts of tiny random diffusion checkpoints that several families share.

All are the reference classes at sizes that load and run in seconds on a CPU. Tokenizers are trained
here on a few lines: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CORPUS: Final = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial",
    "relationships of the objects and background: system user assistant",
    "A red fox jumps over a lazy dog, blue sky, oil painting, four small houses by the sea.",
    "blurry, low quality, a photo of a cat that holds a sign, turn the house green",
)
QWEN_SPECIALS: Final = (
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


def qwen_tokenizer() -> Any:
    """A byte-level BPE with Qwen's special tokens and chat template."""
    from transformers import Qwen2TokenizerFast

    return Qwen2TokenizerFast(
        tokenizer_object=_trained_bpe(QWEN_SPECIALS),
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(QWEN_SPECIALS[1:]),
        chat_template=CHAT_TEMPLATE,
    )


def _trained_bpe(specials: Sequence[str], vocab_size: int = 320) -> Tokenizer:
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
