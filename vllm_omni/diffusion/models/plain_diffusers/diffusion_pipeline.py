"""Runs whole requests through a diffusers pipeline as it is."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import PIL.Image
import torch

from vllm_omni.diffusion.models.interface import (
    PipelineComponents,
    PipelineContext,
    ReportStep,
)
from vllm_omni.diffusion.models.loading import DENOISERS, load_reference, modules_of
from vllm_omni.diffusion.models.plain_diffusers.capabilities import PARAMS, capabilities_of
from vllm_omni.diffusion.models.plain_diffusers.signature import signature_of
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.errors import BadRequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray

RESERVED: Final = frozenset(
    {
        "prompt",
        "image",
        "mask_image",
        "height",
        "width",
        "num_inference_steps",
        "num_images_per_prompt",
        "num_videos_per_prompt",
        "generator",
        "output_type",
        "return_dict",
        "callback_on_step_end",
        "callback_on_step_end_tensor_inputs",
        *PARAMS,
    }
)
"""Arguments that `extra_args` cannot give: a request has other fields for them, or none."""


class _StoppedError(Exception):
    """Nobody waits for the result any more."""


class AnyDiffusers:
    """One request from beginning to end; implements `RequestPipeline`."""

    shares_rows: ClassVar[bool] = False

    def __init__(self, context: PipelineContext) -> None:
        self.capabilities = capabilities_of(context.model_dir)
        self._signature = signature_of(context.model_dir)
        self._reference = load_reference(context)
        self._scheduler = copy.deepcopy(getattr(self._reference, "scheduler", None))
        modules = modules_of(self._reference)
        self.components = PipelineComponents(
            denoisers={name: modules[name] for name in DENOISERS if name in modules},
            vae=modules.get("vae"),
            encoders={n: m for n, m in modules.items() if n not in (*DENOISERS, "vae")},
            lora_loader=self._reference if self.capabilities.loads_lora else None,
        )

    def run(self, request: DiffusionRequest, report: ReportStep) -> NDArray[np.uint8] | None:
        """The media of one request; None when `report` said to stop."""
        arguments = self._arguments(request)
        num_done = 0

        def on_step_end(caller: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> Any:
            nonlocal num_done
            num_done = step + 1
            # Fewer than asked for where an input picture stands for the first steps.
            num_steps = vars(caller).get("_num_timesteps", request.num_inference_steps)
            if not report(num_done, num_steps):
                raise _StoppedError
            return tensors

        if self.capabilities.has_step_progress:
            arguments["callback_on_step_end"] = on_step_end
        if self._scheduler is not None:
            # Its own: some keep from one call to the next what they should not.
            self._reference.scheduler = copy.deepcopy(self._scheduler)
        try:
            result = self._reference(**arguments)
        except _StoppedError:
            return None
        except (ValueError, TypeError) as error:
            if num_done:
                raise
            # Before the first step it is about the arguments.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise BadRequestError(f"the model refuses the request: {lines[0]}") from error
        return self._pixels(result)

    def _arguments(self, request: DiffusionRequest) -> dict[str, Any]:
        known = self._signature.arguments
        arguments = self._extra_arguments(request.extra_args)
        arguments["prompt"] = request.prompt
        for name in ("num_inference_steps", "height", "width", *PARAMS):
            value = getattr(request, name)
            if value is not None and name in known:
                arguments[name] = value
        if request.images:
            arguments["image"] = PIL.Image.fromarray(request.images[0])
        if request.mask is not None:
            arguments["mask_image"] = PIL.Image.fromarray(request.mask)
        if "generator" in known:
            arguments["generator"] = torch.Generator("cpu").manual_seed(request.seed)
        arguments["output_type"] = "pil"
        return arguments

    def _extra_arguments(self, extra: Mapping[str, object]) -> dict[str, Any]:
        for name, value in extra.items():
            if name not in self._signature.arguments or name in RESERVED:
                raise BadRequestError(
                    f"{self._signature.name} has no extra argument {name!r}", field="extra_args"
                )
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(v, bool | int | float | str) for v in values):
                raise BadRequestError(
                    f"extra argument {name!r} must be a number, a text or a list of them",
                    field="extra_args",
                )
        return dict(extra)

    def _pixels(self, result: Any) -> NDArray[np.uint8]:
        if self._signature.result == "frames":
            return np.stack([_rgb(frame) for frame in result.frames[0]])
        return _rgb(result.images[0])


def _rgb(picture: Any) -> NDArray[np.uint8]:
    return np.asarray(picture.convert("RGB"))
