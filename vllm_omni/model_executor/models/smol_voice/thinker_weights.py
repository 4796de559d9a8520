"""A Llama-shaped GGUF file to a Hugging Face checkpoint in bfloat16 that vLLM loads.

Runs in the command that assembles the demo checkpoint; needs `gguf`, `tokenizers` and torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from vllm_omni.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from tokenizers import Tokenizer

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""


def write_checkpoint(
    source: Path, target: Path, progress: Callable[[str, float], None] = lambda *_: None
) -> None:
    """Write the Hugging Face form of the GGUF file `source` into the folder `target`.

    `progress` hears of a step's name and its share of the whole.
    """
    import gguf
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(source)
    fields = Fields(reader)
    weights = {}
    for tensor in reader.tensors:
        name, value = read_weight(tensor, fields)
        weights[name] = torch.from_numpy(value).to(torch.bfloat16)
        progress(name, 0.7 / len(reader.tensors))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    progress("tokenizer", 0.1)
    build_tokenizer(fields).save(str(target / "tokenizer.json"))
    tied = "lm_head.weight" not in weights
    files = {
        "config.json": model_config(fields, tied=tied),
        "generation_config.json": generation_config(fields),
        "tokenizer_config.json": tokenizer_config(fields),
    }
    for name, content in files.items():
        (target / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    (target / "chat_template.jinja").write_text(fields.text("tokenizer.chat_template"))
    progress("done", 0.2)


class Fields:
    """The key-value part of a GGUF file."""

    def __init__(self, reader: GGUFReader) -> None:
        self._reader = reader
        architecture = self.text("general.architecture")
        if architecture != "llama":
            raise ConfigError(f"GGUF architecture {architecture!r}, expected 'llama'")

    def _value(self, key: str) -> object:
        field = self._reader.get_field(key)
        if field is None:
            raise ConfigError(f"the GGUF file has no {key!r}")
        return field.contents()

    def text(self, key: str) -> str:
        return str(self._value(key))

    def number(self, key: str) -> float:
        return float(cast(float, self._value(key)))

    def count(self, key: str) -> int:
        return int(cast(int, self._value(key)))

    def texts(self, key: str) -> list[str]:
        return cast(list[str], self._value(key))

    def counts(self, key: str) -> list[int]:
        return [int(x) for x in cast(list[int], self._value(key))]

    def token(self, role: str) -> str:
        """The token that plays a role: `bos`, `eos`, `unknown`, `padding`."""
        return self.texts("tokenizer.ggml.tokens")[self.count(f"tokenizer.ggml.{role}_token_id")]


def read_weight(tensor: ReaderTensor, fields: Fields) -> tuple[str, NDArray[np.float32]]:
    """One tensor with its Hugging Face name, dequantised."""
    import gguf

    value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if tensor.name in _WHOLE:
        return _WHOLE[tensor.name], value
    pieces = tensor.name.split(".")
    if len(pieces) != 4 or pieces[0] != "blk" or pieces[2] not in _PARTS:
        raise ConfigError(f"unknown GGUF tensor {tensor.name!r}")
    _, layer, part, leaf = pieces
    if part == "attn_q":
        value = _halves_from_pairs(value, fields.count("llama.attention.head_count"))
    elif part == "attn_k":
        value = _halves_from_pairs(value, fields.count("llama.attention.head_count_kv"))
    return f"model.layers.{layer}.{_PARTS[part]}.{leaf}", value


def _halves_from_pairs(weight_OI: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """GGUF rotates neighbouring rows, Hugging Face the two halves of a head: reorder the rows."""
    rows, width = weight_OI.shape
    by_head_NPHI = weight_OI.reshape(num_heads, rows // num_heads // 2, 2, width)
    return np.ascontiguousarray(by_head_NPHI.swapaxes(1, 2)).reshape(rows, width)


def build_tokenizer(fields: Fields) -> Tokenizer:
    """The byte-level BPE of SmolLM: digits stand alone, then GPT-2's pattern."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ConfigError(f"GGUF tokenizer {kind}, expected ('gpt2', 'smollm')")
    tokens = fields.texts("tokenizer.ggml.tokens")
    merges: list[tuple[str, str]] = []
    for merge in fields.texts("tokenizer.ggml.merges"):
        first, _, second = merge.partition(" ")
        merges.append((first, second))
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields.counts("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind_ in zip(tokens, types, strict=True)
            if kind_ == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def model_config(fields: Fields, *, tied: bool) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": fields.count("llama.embedding_length"),
        "intermediate_size": fields.count("llama.feed_forward_length"),
        "num_hidden_layers": fields.count("llama.block_count"),
        "num_attention_heads": fields.count("llama.attention.head_count"),
        "num_key_value_heads": fields.count("llama.attention.head_count_kv"),
        "max_position_embeddings": fields.count("llama.context_length"),
        "rms_norm_eps": fields.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": fields.number("llama.rope.freq_base"),
        },
        "vocab_size": fields.count("llama.vocab_size"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields.count("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.count("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.count("tokenizer.ggml.padding_token_id"),
    }


def generation_config(fields: Fields) -> Mapping[str, object]:
    return {
        "bos_token_id": fields.count("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.count("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.count("tokenizer.ggml.padding_token_id"),
    }


def tokenizer_config(fields: Fields) -> Mapping[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": fields.token("bos"),
        "eos_token": fields.token("eos"),
        "pad_token": fields.token("padding"),
        "unk_token": fields.token("unknown"),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.count("llama.context_length"),
    }
