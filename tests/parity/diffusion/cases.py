"""The families and what one request of each looks like to the reference."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch

from vllm_omni.diffusion.models.glm_image.bridges import TOKENS
from vllm_omni.diffusion.models.glm_image.grids import Grids
from vllm_omni.diffusion.models.interface import PipelineContext
from vllm_omni.diffusion.models.loading import load_reference
from vllm_omni.diffusion.request import DiffusionRequest

ROOM = "vllm_omni.diffusion.models"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of checkpoint."""

    family: str
    model_class: str
    variant: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request besides prompts, seed, steps and size."""
    reference_options: Mapping[str, Any] = field(default_factory=dict)
    unguided: float = 1.0
    """The greatest scale that means no guidance."""
    num_images: int = 0
    takes_negative: bool = True
    takes_tokens: bool = False
    """Image tokens come with the request, as from an upstream stage."""
    output: str = "images"

    def __str__(self) -> str:
        return f"{self.family}-{self.variant}" if self.variant else self.family

    def make(self, out_dir: Path, seed: int) -> Path:
        tiny = importlib.import_module(f"{ROOM}.{self.family}.tiny")
        more = {"variant": self.variant} if self.variant else {}
        path: Path = tiny.make_tiny(out_dir, seed, **more)
        return path

    def load(self, model_dir: Path) -> Any:
        module = importlib.import_module(f"{ROOM}.{self.family}.diffusion_pipeline")
        return getattr(module, self.model_class)(context_of(model_dir))

    def request(self, seed: int, prompt: str, steps: int, **more: Any) -> DiffusionRequest:
        sizes = {"height": 64, "width": 64, "negative_prompt": "blurry"}
        images = tuple(picture(seed + i) for i in range(self.num_images))
        if self.takes_tokens:
            more["upstream"] = {TOKENS: image_tokens(seed, {**sizes, **more})}
        return DiffusionRequest(
            request_id=f"{prompt}-{seed}",
            prompt=prompt,
            seed=seed,
            num_inference_steps=steps,
            **{"images": images, **sizes, **self.options, **more},
        )

    def reference_run(self, reference: Any, request: DiffusionRequest, output_type: str) -> Any:
        arguments = dict(self.reference_options)
        for name in self.options:
            if name != "fps":
                arguments[name] = getattr(request, name)
        if request.images:
            arguments["image"] = PIL.Image.fromarray(request.images[0])
        if self.takes_tokens:
            arguments["prior_token_ids"] = large_picture(reference, request)
        if self.takes_negative:
            arguments["negative_prompt"] = request.negative_prompt
        result = reference(
            prompt=request.prompt,
            height=request.height,
            width=request.width,
            num_inference_steps=request.num_inference_steps,
            generator=torch.Generator().manual_seed(request.seed),
            output_type=output_type,
            **arguments,
        )
        return getattr(result, self.output)


def picture(seed: int, height: int = 64, width: int = 64) -> np.ndarray:
    """Large patches of colour, so that scaling keeps something."""
    patches = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return np.asarray(PIL.Image.fromarray(patches).resize((width, height)))


def image_tokens(seed: int, size: Mapping[str, Any]) -> tuple[int, ...]:
    """Of a small and a large picture, from a book of 64."""
    grids = Grids.of_size(size["height"], size["width"])
    count = grids.num_small + grids.num_large
    return tuple(int(i) for i in np.random.default_rng(seed).integers(0, 64, count))


def large_picture(reference: Any, request: DiffusionRequest) -> torch.Tensor:
    """What the reference makes of the tokens that its text model has written."""
    assert request.height is not None
    assert request.width is not None
    written = torch.tensor([request.upstream[TOKENS]])
    rows, columns = request.height // 32, request.width // 32
    large = reference._extract_large_image_tokens(
        written, 0, written.shape[1] - rows * columns, rows * columns
    )
    return reference._upsample_token_ids(large, rows, columns)


def context_of(model_dir: Path) -> PipelineContext:
    return PipelineContext(model_dir=model_dir, device="cpu", dtype=torch.float32)


def load_the_reference(model_dir: Path) -> Any:
    """Its own object, so that nothing of ours can be shared with it."""
    return load_reference(context_of(model_dir))


TRUE_CFG = {"true_cfg_scale": 4.0, "max_sequence_length": 512}
CFG = {"guidance_scale": 4.0, "max_sequence_length": 64}
VIDEO = {**CFG, "num_frames": 9}


def _wan(variant: str) -> Case:
    takes_image = variant.startswith("i2v")
    return Case(
        family="wan_video",
        variant=variant,
        model_class="WanImageToVideo" if takes_image else "WanTextToVideo",
        options=VIDEO,
        num_images=int(takes_image),
        output="frames",
    )


CASES = (
    Case(
        family="qwen_image",
        variant="text_to_image",
        model_class="QwenImage",
        options=TRUE_CFG,
    ),
    Case(
        family="qwen_image",
        variant="edit",
        model_class="QwenImageEdit",
        options={"true_cfg_scale": 4.0},
        num_images=1,
    ),
    Case(
        family="flux",
        variant="dev",
        model_class="Flux",
        options={"guidance_scale": 3.5, "true_cfg_scale": 1.0, "max_sequence_length": 64},
    ),
    Case(
        family="flux",
        variant="schnell",
        model_class="Flux",
        options={"true_cfg_scale": 2.0, "max_sequence_length": 64},
    ),
    Case(family="stable_diffusion_3", model_class="StableDiffusion3", options=CFG),
    Case(family="z_image", model_class="ZImage", options=CFG, unguided=0.0),
    Case(
        family="glm_image",
        model_class="GlmImage",
        options=CFG,
        takes_negative=False,
        takes_tokens=True,
    ),
    *map(_wan, ("t2v_2_1", "i2v_2_1", "t2v_2_2", "i2v_2_2", "ti2v_2_2")),
)
