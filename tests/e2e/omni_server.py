"""A server of a tiny omni checkpoint, and what its clients send."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from openai import OpenAI
from safetensors.torch import save_file

from benchmarks.served import Server, serve

ARGUMENTS = (
    "--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", "67108864",
)  # fmt: skip


@contextmanager
def served(model_dir: Path, log: Path, *arguments: str) -> Iterator[tuple[Server, OpenAI]]:
    """`vllm serve` and the official client."""
    with (
        serve(model_dir, log, [*ARGUMENTS, *arguments], timeout_s=600.0) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield server, client


def without_voice(model_dir: Path) -> Path:
    """Mark a checkpoint as one that cannot speak, so that its thinker is all that starts."""
    path = model_dir / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "enable_audio_output": False}), encoding="utf-8")
    return model_dir


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(kind, data)}}


def video(data: bytes, kind: str = "video/mp4") -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(kind, data)}}


def audio(data: bytes, form: str = "wav") -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": text, "format": form}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def turn(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def wave(seconds: float = 1.0, rate_hz: int = 16000, channels: int = 1) -> NDArray[np.float32]:
    time_s = np.arange(int(seconds * rate_hz)) / rate_hz
    tone = 0.3 * np.sin(2 * np.pi * 330 * time_s)
    return np.repeat(tone[:, None], channels, axis=1).astype(np.float32)


def wav(samples: NDArray[np.float32], rate_hz: int = 16000) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate_hz, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def write_adapter(folder: Path, model_dir: Path) -> Path:
    """A LoRA adapter of large random weights for the thinker's attention."""
    text = json.loads((model_dir / "config.json").read_text())["thinker_config"]["text_config"]
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    width = heads * (text.get("head_dim") or hidden // heads)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(text["num_hidden_layers"]):
        name = f"base_model.model.thinker.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, hidden, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(width, 8, generator=generator)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
