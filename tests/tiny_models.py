"""Tiny random checkpoints in Hugging Face form, made in seconds, for tests with real engines.

Weights come from the reference classes with a fixed seed, so a test can compare vLLM with
transformers token by token. Tokenizers are trained here on a few lines: nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

CORPUS = (
    "The quick brown fox jumps over the lazy dog.",
    "Hello there, how are you today? I am fine, thank you!",
    "A small model says small things; it counts one, two, three, four.",
    "Who are you? A user, an assistant or a system?",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WHISPER_SPECIALS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)


def train_tokenizer(specials: Sequence[str], vocab_size: int = 384) -> object:
    """A byte-level BPE `tokenizers.Tokenizer`; ids of the special tokens come first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def make_tiny_llama(out_dir: Path, seed: int = 0, max_positions: int = 512) -> Path:
    """Write a Llama of 2 layers and width 64 with tokenizer and chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(LLAMA_SPECIALS),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=max_positions,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return out_dir


def make_tiny_whisper(out_dir: Path, seed: int = 0) -> Path:
    """Write a Whisper of 2+2 layers and width 64 with processor and generation config."""
    import torch
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperTokenizerFast,
    )

    tokenizer = WhisperTokenizerFast(
        tokenizer_object=train_tokenizer(WHISPER_SPECIALS),
        unk_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(WHISPER_SPECIALS[1:]),
    )
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in WHISPER_SPECIALS}
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=80,
        max_source_positions=1500,
        max_target_positions=448,
        init_std=0.2,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"],
    )
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"],
        no_timestamps_token_id=ids["<|notimestamps|>"],
        lang_to_id={"<|en|>": ids["<|en|>"], "<|de|>": ids["<|de|>"]},
        task_to_id={
            "transcribe": ids["<|transcribe|>"],
            "translate": ids["<|translate|>"],
        },
        is_multilingual=True,
        max_length=448,
    )
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(out_dir)
    return out_dir


def config_of(model_dir: Path) -> dict[str, object]:
    """The checkpoint's `config.json`."""
    config: dict[str, object] = json.loads((model_dir / "config.json").read_text())
    return config
