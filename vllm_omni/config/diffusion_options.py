"""Engine options of DIFFUSION stages: names, types and defaults. No torch in here.

What a model or a device cannot do is refused when the replica starts, not ignored.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionEngineArgs:
    """Engine options of one diffusion stage."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of denoiser and text encoders. `auto`: bfloat16 on a GPU, float32 on a CPU."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: random weights of the configured shapes."""
    enforce_eager: bool | None = None
    """False: compile the denoiser's repeated blocks. True: do not. None: compile on a GPU, unless
    weights are offloaded."""
    attention_backend: str | None = None
    """Attention implementation of the denoiser, by diffusers' name (`native`: torch's). None:
    FlashAttention 3 where vLLM has it for the device, else the model's own."""
    vae_tiling: Literal["auto", "on", "off"] = "auto"
    """Decode in tiles, which blend at their borders. `auto`: only when memory ran out."""
    vae_slicing: Literal["on", "off"] = "off"
    """Decode the parts of a batch one after another."""
    offload: Literal["none", "group"] = "none"
    """`group`: weights stay in host memory, and groups of layers come to the GPU in turn."""
    step_cache: Literal["none", "first_block"] = "none"
    """Skip computation between steps. The stage then runs one request per forward."""
    step_cache_threshold: float = 0.08
    """The relative change of the first block below which the rest of a step is taken from the
    cache: for requests without `quality`; half of it for `high`, never for `lossless`."""
    modulations: Literal["auto", "each_step"] = "auto"
    """Of the denoiser's blocks. `auto`: computed for many steps at once where the model's depend on
    nothing that a step changes, and weights are not offloaded. `each_step`: as the model does."""
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters by name: path of a folder or a safetensors file."""
    conditioning_cache_bytes: int = 256 * 1024 * 1024
    """Most memory that encoded prompts may hold after their requests; 0: none are kept."""
    compile_sizes: tuple[str, ...] = ()
    """Sizes `WIDTHxHEIGHT` compiled for before the replica is ready; empty: the model's own."""
    max_prepared: int | None = None
    """Requests that may be encoded and hold latents at once; None: twice `max_batch_size`."""


@functools.cache
def diffusion_option_types() -> Mapping[str, object]:
    """Name and type of every engine option of a diffusion stage."""
    return typing.get_type_hints(DiffusionEngineArgs)
