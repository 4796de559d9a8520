"""What FLUX.1 checkpoints can do; imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_omni.diffusion.models.interface import Capabilities, ExecutionMode
from vllm_omni.errors import ConfigError


def text_to_image(model_dir: Path) -> Capabilities:
    """dev takes a guidance scale as an input; schnell has none and needs four steps."""
    is_dev = _has_guidance(model_dir)
    defaults: dict[str, object] = {
        "num_inference_steps": 28 if is_dev else 4,
        "height": 1024,
        "width": 1024,
        "true_cfg_scale": 1.0,
        "max_sequence_length": 512 if is_dev else 256,
    }
    params = {"true_cfg_scale", "negative_prompt", "max_sequence_length", "lora"}
    if is_dev:
        defaults["guidance_scale"] = 3.5
        params.add("guidance_scale")
    return Capabilities(
        mode=ExecutionMode.STEP,
        params=frozenset(params),
        defaults=defaults,
        size_multiple=16,
        has_preview=True,
        loads_lora=True,
    )


def _has_guidance(model_dir: Path) -> bool:
    path = model_dir / "transformer" / "config.json"
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")).get("guidance_embeds"))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
