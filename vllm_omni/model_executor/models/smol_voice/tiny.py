"""A tiny random checkpoint of this family, made in seconds from the reference classes.

Same folder layout, same engines, a few megabytes; what it writes and says means nothing. Tests and
`tools/make_tiny.py` use it. Tokenizers are trained here on a few lines: nothing is downloaded.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from vllm_omni.model_executor.models.smol_voice.voice_graph import with_noise_input

if TYPE_CHECKING:
    from onnx import ModelProto
    from tokenizers import Tokenizer

MODEL_TYPE: Final = "smol_voice"

CORPUS: Final = (
    "The quick brown fox jumps over the lazy dog.",
    "Hello there, how are you today? I am fine, thank you!",
    "A small model says small things; it counts one, two, three, four.",
    "Who are you? A user, an assistant or a system?",
    "What is the capital of France? The capital of France is Paris.",
)

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA_SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WHISPER_SPECIALS: Final = (
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

SAMPLE_RATE_HZ: Final = 16_000
SAMPLES_PER_FRAME: Final = 128
FRAMES_PER_ID: Final = 3
"""At length scale 1."""


def make_tiny(out_dir: Path, seed: int = 0) -> Path:
    """Write the whole checkpoint; the same seed gives the same bytes."""
    make_tiny_whisper(out_dir / "asr", seed)
    make_tiny_llama(out_dir / "thinker", seed + 1, max_positions=2048)
    make_tiny_voice(out_dir / "voice", seed + 2)
    config = {"model_type": MODEL_TYPE, "architectures": ["SmolVoiceForConditionalGeneration"]}
    _write_json(out_dir / "config.json", config)
    return out_dir


def train_tokenizer(specials: Sequence[str], vocab_size: int = 384) -> Tokenizer:
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


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Torch's random numbers from a seed inside, as they were afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def make_tiny_llama(out_dir: Path, seed: int = 0, max_positions: int = 512) -> Path:
    """Write a Llama of 2 layers and width 64 with tokenizer and chat template."""
    from transformers import (
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(LLAMA_SPECIALS),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
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
        tie_word_embeddings=False,
        **ids,
    )
    with _seeded(seed):
        model = LlamaForCausalLM(config)
    # Random weights seldom choose the end token: bound what a request without a limit writes.
    model.generation_config = GenerationConfig(max_new_tokens=64, **ids)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return out_dir


def make_tiny_whisper(out_dir: Path, seed: int = 0) -> Path:
    """Write a Whisper of 2+2 layers and width 64 with processor and generation config."""
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
    token_ids = {token: tokenizer.convert_tokens_to_ids(token) for token in WHISPER_SPECIALS}
    ids = {
        "bos_token_id": token_ids["<|endoftext|>"],
        "eos_token_id": token_ids["<|endoftext|>"],
        "pad_token_id": token_ids["<|endoftext|>"],
        "decoder_start_token_id": token_ids["<|startoftranscript|>"],
    }
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
        **ids,
    )
    with _seeded(seed):
        model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        no_timestamps_token_id=token_ids["<|notimestamps|>"],
        lang_to_id={"<|en|>": token_ids["<|en|>"], "<|de|>": token_ids["<|de|>"]},
        task_to_id={
            "transcribe": token_ids["<|transcribe|>"],
            "translate": token_ids["<|translate|>"],
        },
        is_multilingual=True,
        max_length=448,
        **ids,
    )
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(out_dir)
    return out_dir


def make_tiny_voice(out_dir: Path, seed: int = 0) -> Path:
    """Write a voice with a Piper voice's interface: each character is a hum of its own."""
    import onnx

    out_dir.mkdir(parents=True, exist_ok=True)
    characters = string.ascii_letters + string.digits + string.punctuation + " "
    symbols = dict.fromkeys(("_", "^", "$", *characters))
    settings = {
        "audio": {"sample_rate": SAMPLE_RATE_HZ},
        "phoneme_type": "text",
        "inference": {"noise_scale": 0.667, "length_scale": 1.0, "noise_w": 0.8},
        "num_speakers": 1,
        "speaker_id_map": {},
        "phoneme_id_map": {symbol: [i] for i, symbol in enumerate(symbols)},
    }
    onnx.save(with_noise_input(_hum(len(symbols), seed)), out_dir / "voice.onnx")
    _write_json(out_dir / "voice.json", settings)
    return out_dir


def _hum(num_symbols: int, seed: int) -> ModelProto:
    """Ids to a waveform: a table of frames, each repeated for its length, and a little noise."""
    from onnx import TensorProto, checker, helper, numpy_helper

    rng = np.random.default_rng(seed)
    periods = rng.integers(1, 12, size=(num_symbols, 1))
    phase = np.arange(SAMPLES_PER_FRAME) * (2 * np.pi / SAMPLES_PER_FRAME)
    constants = {
        "table": np.sin(periods * phase).astype(np.float32),
        "frames_per_id": np.array([FRAMES_PER_ID], dtype=np.float32),
        "loudness": np.array(0.3, dtype=np.float32),
        "noisiness": np.array(0.02, dtype=np.float32),
        "first": np.array([0], dtype=np.int64),
        "one": np.array([1], dtype=np.int64),
        "two": np.array([2], dtype=np.int64),
        "flat": np.array([1, 1, -1], dtype=np.int64),
    }
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "input"], ["frames"]),  # [1, T, H]
        node("Unsqueeze", ["frames", "two"], ["frames_4d"]),  # [1, T, 1, H]
        node("Slice", ["scales", "one", "two", "first"], ["length_scale"]),
        node("Mul", ["length_scale", "frames_per_id"], ["length"]),
        node("Ceil", ["length"], ["length_up"]),
        node("Cast", ["length_up"], ["repeats"], to=TensorProto.INT64),
        node("Concat", ["one", "one", "repeats", "one"], ["tiles"], axis=0),
        node("Tile", ["frames_4d", "tiles"], ["tiled"]),  # [1, T, repeats, H]
        node("Reshape", ["tiled", "flat"], ["wave"]),  # [1, 1, samples]
        node("RandomNormalLike", ["wave"], ["random"]),
        node("Slice", ["scales", "first", "one", "first"], ["noise_scale"]),
        node("Mul", ["noise_scale", "noisiness"], ["noise_level"]),
        node("Mul", ["random", "noise_level"], ["hiss"]),
        node("Mul", ["wave", "loudness"], ["tone"]),
        node("Add", ["tone", "hiss"], ["output"]),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "hum",
        [
            info("input", TensorProto.INT64, [1, "phonemes"]),
            info("input_lengths", TensorProto.INT64, [1]),
            info("scales", TensorProto.FLOAT, [3]),
        ],
        [info("output", TensorProto.FLOAT, [1, 1, "samples"])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)
    checker.check_model(model)
    return model


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
