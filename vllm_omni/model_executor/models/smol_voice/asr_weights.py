"""Whisper from CTranslate2's file format to a Hugging Face checkpoint that vLLM loads.

Runs in the command that assembles the demo checkpoint; needs torch only to write safetensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from vllm_omni.errors import ConfigError

Array = NDArray[np.generic]

FORMAT_VERSION = 6
_DTYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}


def read_variables(path: Path) -> dict[str, Array]:
    """Every variable of a CTranslate2 model file, by its own name."""
    with path.open("rb") as file:
        (version,) = _unpack(file, "<I")
        if version != FORMAT_VERSION:
            raise ConfigError(f"{path}: CTranslate2 format {version}, expected {FORMAT_VERSION}")
        spec = _string(file)
        if spec != "WhisperSpec":
            raise ConfigError(f"{path}: holds a {spec}, expected a WhisperSpec")
        _, count = _unpack(file, "<II")
        return dict(_variable(file) for _ in range(count))


def _unpack(file: BinaryIO, layout: str) -> tuple[int, ...]:
    size = struct.calcsize(layout)
    data = file.read(size)
    if len(data) != size:
        raise ConfigError(f"{file.name}: ends too early")
    return struct.unpack(layout, data)


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<H")
    return file.read(length).rstrip(b"\0").decode()


def _variable(file: BinaryIO) -> tuple[str, Array]:
    name = _string(file)
    (rank,) = _unpack(file, "<B")
    shape = _unpack(file, f"<{rank}I")
    dtype, num_bytes = _unpack(file, "<BI")
    data = file.read(num_bytes)
    if dtype not in _DTYPES or len(data) != num_bytes:
        raise ConfigError(f"{file.name}: cannot read variable {name!r}")
    return name, np.frombuffer(data, dtype=_DTYPES[dtype]).reshape(shape)


_SETTINGS = (
    "activation",
    "alibi",
    "alignment_heads",
    "alignment_layer",
    "num_heads",
    "pre_norm",
    "scale_embeddings",
    "start_from_zero_embedding",
)
"""Variables that hold settings, not weights."""

_WHOLE = {
    "encoder/conv1": "model.encoder.conv1",
    "encoder/conv2": "model.encoder.conv2",
    "encoder/layer_norm": "model.encoder.layer_norm",
    "decoder/layer_norm": "model.decoder.layer_norm",
    "encoder/position_encodings/encodings": "model.encoder.embed_positions.weight",
    "decoder/position_encodings/encodings": "model.decoder.embed_positions.weight",
    "decoder/embeddings/weight": "model.decoder.embed_tokens.weight",
}
_PARTS = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_0": "self_attn.{q,k,v}_proj",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_1": "encoder_attn.{k,v}_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
_LEAVES = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


def to_hugging_face(variables: Mapping[str, Array]) -> dict[str, Array]:
    """The weights under their Hugging Face names; every variable is used exactly once."""
    weights: dict[str, Array] = {}
    for name, value in variables.items():
        if name.rsplit("/", 1)[-1] in _SETTINGS:
            continue
        for new_name, part in _renamed(name, value):
            # The keys of Whisper have no bias; CTranslate2 stores zeros in its place.
            if new_name.endswith("k_proj.bias"):
                if part.any():
                    raise ConfigError(f"{name}: a bias of attention keys, which Whisper has not")
                continue
            weights[new_name] = part
    return weights


def _renamed(name: str, value: Array) -> Iterator[tuple[str, Array]]:
    if name in _WHOLE:
        yield _WHOLE[name], value
        return
    prefix, leaf = name.rsplit("/", 1)
    if prefix in _WHOLE:
        yield f"{_WHOLE[prefix]}.{_LEAVES[leaf]}", value
        return
    side, _, rest = prefix.partition("/layer_")
    layer, _, part = rest.partition("/")
    if part not in _PARTS or leaf not in _LEAVES:
        raise ConfigError(f"unknown Whisper variable {name!r}")
    target = f"model.{side}.layers.{layer}.{_PARTS[part]}.{_LEAVES[leaf]}"
    before, brace, rest = target.partition("{")
    if not brace:
        yield target, value
        return
    names, _, after = rest.partition("}")
    letters = names.split(",")
    for letter, piece in zip(letters, np.split(value, len(letters)), strict=True):
        yield f"{before}{letter}{after}", piece


def write_checkpoint(
    source: Path, target: Path, progress: Callable[[str, float], None] = lambda *_: None
) -> None:
    """Write the Hugging Face form of the CTranslate2 folder `source` into `target`.

    `progress` hears of a step's name and its share of the whole.
    """
    import torch
    from safetensors.torch import save_file

    variables = read_variables(source / "model.bin")
    progress("weights", 0.3)
    weights = to_hugging_face(variables)
    save_file(
        {name: torch.from_numpy(value.copy()) for name, value in weights.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    progress("tokenizer", 0.5)
    settings = json.loads((source / "config.json").read_text())
    vocabulary = json.loads((source / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
    vocabulary["added_tokens"] += time_tokens(ids["<|notimestamps|>"] + 1)
    files = {
        "tokenizer.json": vocabulary,
        "config.json": model_config(variables, ids, settings),
        "generation_config.json": generation_config(ids, settings),
        "preprocessor_config.json": PREPROCESSOR,
        "tokenizer_config.json": tokenizer_config(ids),
    }
    for name, content in files.items():
        (target / name).write_text(json.dumps(content, indent=2) + "\n")
    progress("done", 0.2)


def time_tokens(first_id: int) -> list[dict[str, object]]:
    """The tokens of times, 0.00 to 30.00 s: the model has them, the source's tokenizer has not."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": first_id + i, "content": f"<|{i / 50:.2f}|>", **flags, "special": True}
        for i in range(1501)
    ]


def model_config(
    variables: Mapping[str, Array], ids: Mapping[str, int], settings: Mapping[str, object]
) -> dict[str, object]:
    """`config.json`, with every size read from the weights."""
    vocab_size, width = variables["decoder/embeddings/weight"].shape
    feed_forward = variables["encoder/layer_0/ffn/linear_0/weight"].shape[0]

    def layers(side: str) -> int:
        return len(
            {n.split("/")[1] for n in variables if n.startswith(f"{side}/layer_")} - {"layer_norm"}
        )

    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": "float16",
        "activation_function": "gelu",
        "d_model": width,
        "encoder_layers": layers("encoder"),
        "decoder_layers": layers("decoder"),
        "num_hidden_layers": layers("encoder"),
        "encoder_attention_heads": int(variables["encoder/num_heads"]),
        "decoder_attention_heads": int(variables["decoder/num_heads"]),
        "encoder_ffn_dim": feed_forward,
        "decoder_ffn_dim": feed_forward,
        "num_mel_bins": variables["encoder/conv1/weight"].shape[1],
        "max_source_positions": variables["encoder/position_encodings/encodings"].shape[0],
        "max_target_positions": variables["decoder/position_encodings/encodings"].shape[0],
        "vocab_size": vocab_size,
        "scale_embedding": bool(variables["decoder/scale_embeddings"]),
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "suppress_tokens": settings["suppress_ids"],
        "begin_suppress_tokens": settings["suppress_ids_begin"],
    }


def generation_config(ids: Mapping[str, int], settings: Mapping[str, object]) -> dict[str, object]:
    end = ids["<|endoftext|>"]
    return {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "suppress_tokens": settings["suppress_ids"],
        "begin_suppress_tokens": settings["suppress_ids_begin"],
        "alignment_heads": settings["alignment_heads"],
        "is_multilingual": False,
        "max_length": 448,
        "return_timestamps": False,
    }


def tokenizer_config(ids: Mapping[str, int]) -> dict[str, object]:
    end = "<|endoftext|>"
    assert end in ids, "a Whisper vocabulary has an end token"
    return {
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        "add_prefix_space": False,
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "unk_token": end,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
    }


PREPROCESSOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "WhisperProcessor",
    "feature_size": 80,
    "sampling_rate": 16000,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
    "n_samples": 480000,
    "nb_max_frames": 3000,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
}
"""The 80-band log-mel front end of every Whisper before large-v3."""
