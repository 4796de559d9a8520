"""From the fields of a request to the engine and back: what images and chat have in common."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from vllm_omni.config.pipeline import Task
from vllm_omni.diffusion.checks import NEEDS_MASK
from vllm_omni.diffusion.models.interface import Capabilities as DiffusionCapabilities
from vllm_omni.entrypoints.openai.capabilities import Capabilities
from vllm_omni.entrypoints.openai.images.protocol import (
    DenoiseFields,
    PictureFields,
    parse_quality,
    parse_size,
)
from vllm_omni.entrypoints.openai.media.image_loader import ImageLoader, InputImages
from vllm_omni.entrypoints.openai.media.images import OutputFormat, encode_image
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.entrypoints.openai.models.serving import OmniModels
from vllm_omni.entrypoints.prompts import DeferredPrompt
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams, check_prompt
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.outputs.request_output import OmniRequestOutput

if TYPE_CHECKING:
    from PIL.Image import Image

    from vllm_omni.entrypoints.async_omni import AsyncOmni

_HTTP_NAMES: Final = {
    "height": "size",
    "width": "size",
    "num_outputs_per_prompt": "n",
    "preview_interval": "partial_images",
    "images": "image",
}
"""The engine's names of fields, to those that clients know."""
_NO_NAMES: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class PictureFile:
    """How a picture is written."""

    form: OutputFormat = "png"
    compression: int | None = None

    @classmethod
    def of(cls, request: PictureFields) -> PictureFile:
        form = request.output_format or "png"
        if request.output_compression is not None and form == "png":
            raise BadRequestError(
                "output_compression goes with jpeg and webp; png loses nothing",
                field="output_compression",
            )
        return cls(form, request.output_compression)

    def base64(self, image: Image) -> str:
        """The whole file. In the media pool."""
        return base64.b64encode(encode_image(image, self.form, self.compression)).decode()


class DenoiseRequests:
    """Starts requests of a diffusion stage."""

    def __init__(
        self,
        omni: AsyncOmni,
        capabilities: Capabilities,
        models: OmniModels,
        loader: ImageLoader,
        pool: MediaPool,
    ) -> None:
        self._omni = omni
        self._capabilities = capabilities
        self._models = models
        self._loader = loader
        self._pool = pool

    def check_admission(self, num: int = 1) -> None:
        self._omni.check_admission(num)

    def check_request(
        self, request: DenoiseFields, prompt: str, given: InputImages, image_field: str = "image"
    ) -> str:
        """All that can be refused before anything is decoded; the model's served name."""
        name = self._models.check_name(request.model)
        if not prompt.strip():
            raise BadRequestError("prompt must not be empty", field="prompt")
        check_prompt("prompt", prompt)
        known = self._capabilities.diffusion
        if known is not None:
            num = len(given.images)
            if num < known.min_images:
                raise BadRequestError(
                    f"this model starts from pictures: it needs {known.min_images}",
                    field=image_field,
                )
            if num > known.max_images:
                raise BadRequestError(
                    f"this model reads {known.max_images or 'no'} pictures, got {num}",
                    field=image_field,
                )
            if given.mask is not None and not known.takes_mask:
                raise BadRequestError("this model takes no mask", field="mask")
            if given.mask is None and known.needs_mask:
                raise BadRequestError(NEEDS_MASK, field="mask")
        self._loader.check(given, image_field)
        return name

    def preview_interval(self, num_previews: int | None, num_steps: int | None) -> int | None:
        """After how many steps a preview is due, so that `num_previews` are spread evenly."""
        if not num_previews:
            return None
        known = self._capabilities.diffusion
        if known is None:
            return num_steps and max(1, num_steps // (num_previews + 1))
        if not known.has_preview:
            raise BadRequestError(
                "this model gives no pictures before the last one", field="partial_images"
            )
        steps = num_steps or known.defaults.get("num_inference_steps")
        assert isinstance(steps, int), "every model has a default number of steps"
        return max(1, steps // (num_previews + 1))

    @property
    def known(self) -> DiffusionCapabilities | None:
        """What the stage that makes pictures or videos can do, if it says."""
        return self._capabilities.diffusion

    async def load(self, prompt: str, given: InputImages) -> OmniPrompt:
        """A prompt with its pictures decoded.

        Raises:
            BadRequestError: names the picture.
        """
        images, mask = await self._loader.load(given)
        return OmniPrompt(text=prompt, images=images, mask=mask)

    async def check_prepared(
        self,
        task: Task,
        prompt: OmniPrompt,
        params: OmniDiffusionSamplingParams,
        names: Mapping[str, str] = _NO_NAMES,
    ) -> None:
        """Everything that would refuse the request when it runs.

        Raises:
            OmniError: fields have the names that clients know.
        """
        with _renaming(names):
            await self._omni.check_request(prompt, params, task=task)

    async def run(
        self,
        task: Task,
        prompt: OmniPrompt | DeferredPrompt,
        params: OmniDiffusionSamplingParams,
        deadline_s: float | None = None,
        names: Mapping[str, str] = _NO_NAMES,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Outputs as the engine makes them; closing it aborts the request within a step.

        `names` are further names of the engine's fields.

        Raises:
            OmniError: fields have the names that clients know.
        """
        outputs = self._omni.generate(
            prompt, params, f"{task}-{uuid4().hex}", task=task, deadline_s=deadline_s
        )
        with _renaming(names):
            async with aclosing(outputs):
                async for output in outputs:
                    yield output

    async def encode(self, file: PictureFile, image: Image) -> str:
        """A picture as the base64 text of a file."""
        return await self._pool.run(file.base64, image)


def denoise_params(
    request: DenoiseFields, names: Mapping[str, str] = _NO_NAMES, **more: object
) -> OmniDiffusionSamplingParams:
    """The engine's params of a request. What only the model can say is checked there.

    Raises:
        BadRequestError: names the field as clients know it.
    """
    size = parse_size(request.size)
    with _renaming(names):
        return OmniDiffusionSamplingParams(
            seed=request.seed,
            width=size[0] if size else None,
            height=size[1] if size else None,
            quality=parse_quality(request.quality),
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            true_cfg_scale=request.true_cfg_scale,
            negative_prompt=request.negative_prompt,
            max_sequence_length=request.max_sequence_length,
            lora=request.lora,
            lora_scale=request.lora_scale,
            extra_args=dict(request.extra_args or {}),
            **more,  # type: ignore[arg-type]
        )


@contextmanager
def _renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the engine name fields as clients know them."""
    try:
        yield
    except BadRequestError as error:
        field = error.field or ""
        error.field = names.get(field) or _HTTP_NAMES.get(field) or error.field
        raise
