"""What Wan checkpoints can do; imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_omni.config.pipeline import Modality
from vllm_omni.diffusion.models.interface import Capabilities, ExecutionMode
from vllm_omni.errors import ConfigError


def text_to_video(model_dir: Path) -> Capabilities:
    """Wan 2.1 and 2.2 text to video."""
    return _describe(model_dir, num_images=0)


def image_to_video(model_dir: Path) -> Capabilities:
    """Wan 2.1 and 2.2: a video that begins with a picture."""
    return _describe(model_dir, num_images=1)


def _describe(model_dir: Path, num_images: int) -> Capabilities:
    vae = _read(model_dir / "vae" / "config.json")
    patch = _read(model_dir / "transformer" / "config.json").get("patch_size", (1, 2, 2))
    is_small_2_2 = bool(_read(model_dir / "model_index.json").get("expand_timesteps"))
    # The small Wan 2.2 was trained at 24 frames a second, all others at 16.
    height, width, num_frames, fps = (704, 1280, 121, 24) if is_small_2_2 else (480, 832, 81, 16)
    return Capabilities(
        mode=ExecutionMode.STEP,
        emits=Modality.VIDEO,
        params=frozenset(
            {
                "num_frames",
                "fps",
                "guidance_scale",
                "negative_prompt",
                "max_sequence_length",
                "lora",
            }
        ),
        defaults={
            "num_inference_steps": 50,
            "height": height,
            "width": width,
            "num_frames": num_frames,
            "fps": fps,
            "guidance_scale": 5.0,
            "max_sequence_length": 512,
        },
        # The reference refuses what is no multiple of 16.
        size_multiple=max(16, vae.get("scale_factor_spatial", 8) * patch[1]),
        max_pixels=1920 * 1088,
        max_frames=241,
        frames_multiple=vae.get("scale_factor_temporal", 4),
        min_images=num_images,
        max_images=num_images,
        loads_lora=True,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content
