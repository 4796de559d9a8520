"""Pictures by OpenAI's images API: whole answers, and streams of what happens till then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from vllm_omni.config.pipeline import Task
from vllm_omni.entrypoints.openai.errors import describe
from vllm_omni.entrypoints.openai.images.pictures import (
    DenoiseRequests,
    PictureFile,
    denoise_params,
)
from vllm_omni.entrypoints.openai.images.protocol import ImageRequest
from vllm_omni.entrypoints.openai.images.usage import patches, usage_of
from vllm_omni.entrypoints.openai.media.image_loader import InputImages
from vllm_omni.entrypoints.openai.responses import primed
from vllm_omni.entrypoints.prompts import DeferredPrompt
from vllm_omni.errors import BadRequestError, OmniError, RequestFailedError
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.outputs.request_output import OmniRequestOutput

if TYPE_CHECKING:
    from PIL.Image import Image

GENERATION: Final = "image_generation"
EDIT: Final = "image_edit"


@dataclass(slots=True)
class _Job:
    """One request, checked."""

    kind: str
    """First half of its events' names."""
    request: ImageRequest
    given: InputImages
    params: OmniDiffusionSamplingParams
    file: PictureFile
    created_s: int
    num_input_tokens: int = 0
    """Of its pictures."""

    def usage(self, *images: Image) -> dict[str, Any]:
        """OpenAI's, for these pictures."""
        num_made = sum(patches(*image.size) for image in images)
        return usage_of(self.request.prompt, self.num_input_tokens, num_made)

    @property
    def settings(self) -> dict[str, Any]:
        """What every answer repeats of the request."""
        return {
            "background": "opaque",
            "output_format": self.file.form,
            "quality": self.request.quality or "auto",
        }


@dataclass(frozen=True, slots=True)
class PictureStream:
    """A request whose first output is there."""

    events: AsyncGenerator[str, None]
    source: AsyncGenerator[OmniRequestOutput, None]


class ImageServing:
    """Knows no HTTP: typed requests in, answers or events out."""

    def __init__(self, requests: DenoiseRequests) -> None:
        self._requests = requests

    def check_admission(self) -> None:
        self._requests.check_admission()

    async def create(self, kind: str, request: ImageRequest, given: InputImages) -> dict[str, Any]:
        """All pictures of a request, in OpenAI's answer.

        Raises:
            OmniError, AnsweredError: nothing is left running.
        """
        job = self._checked(kind, request, given)
        images: dict[int, Image] = {}
        async with aclosing(self._outputs(job)) as outputs:
            async for output in outputs:
                if output.images:
                    images[output.index] = output.images[0]
        num = job.params.num_outputs_per_prompt
        _check_complete(images, num)
        files = await asyncio.gather(
            *(self._requests.encode(job.file, images[index]) for index in range(num))
        )
        return {
            "created": job.created_s,
            "data": [{"b64_json": file} for file in files],
            "size": _size(images[0]),
            **job.settings,
            "usage": job.usage(*images.values()),
        }

    async def start(self, kind: str, request: ImageRequest, given: InputImages) -> PictureStream:
        """Begin a stream; returns when its first output is there.

        Raises:
            OmniError, AnsweredError: nothing is left running.
        """
        job = self._checked(kind, request, given)
        _, outputs = await primed(self._outputs(job))
        return PictureStream(self._events(job, outputs), outputs)

    def _checked(self, kind: str, request: ImageRequest, given: InputImages) -> _Job:
        if kind == EDIT and not given.images:
            raise BadRequestError("there is no picture to edit", field="image")
        self._requests.check_request(request, request.prompt, given)
        if request.response_format == "url":
            raise BadRequestError(
                "this server keeps no pictures, so there is no URL; use b64_json",
                field="response_format",
            )
        if request.background == "transparent":
            raise BadRequestError("this model paints opaque pictures", field="background")
        if request.partial_images and not request.stream:
            raise BadRequestError("partial images come with stream=true", field="partial_images")
        file = PictureFile.of(request)
        interval = self._requests.preview_interval(
            request.partial_images, request.num_inference_steps
        )
        params = denoise_params(
            request,
            num_outputs_per_prompt=1 if request.n is None else request.n,
            strength=request.strength,
            preview_interval=interval,
        )
        self._requests.check_admission(params.num_outputs_per_prompt)
        return _Job(kind, request, given, params, file, int(time.time()))

    def _outputs(self, job: _Job) -> AsyncGenerator[OmniRequestOutput, None]:
        async def load() -> OmniPrompt:
            prompt = await self._requests.load(job.request.prompt, job.given)
            job.num_input_tokens = sum(patches(*image.size) for image in prompt.images)
            return prompt

        return self._requests.run(Task.IMAGE, DeferredPrompt(load), job.params)

    async def _events(
        self, job: _Job, outputs: AsyncGenerator[OmniRequestOutput, None]
    ) -> AsyncGenerator[str, None]:
        """Server-sent events; an error after the headers is one too."""
        num = job.params.num_outputs_per_prompt
        num_done, num_previews, steps = 0, [0] * num, [0] * num
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    # Outputs that were read late are merged, and say the same step again.
                    if output.progress is not None and output.progress.step > steps[output.index]:
                        steps[output.index] = output.progress.step
                        yield _progress(job, output)
                    if output.preview is not None:
                        sent = num_previews[output.index]
                        if sent < (job.request.partial_images or 0):
                            num_previews[output.index] += 1
                            yield await self._preview(job, output, output.preview, sent)
                    for image in output.images:
                        num_done += 1
                        yield await self._completed(job, output, image)
            if num_done < num:
                raise RequestFailedError("the model gave no picture")
        except OmniError as exc:
            yield describe(exc).event()

    async def _preview(
        self, job: _Job, output: OmniRequestOutput, image: Image, number: int
    ) -> str:
        return _event(
            f"{job.kind}.partial_image",
            b64_json=await self._requests.encode(job.file, image),
            partial_image_index=number,
            **_common(job, output, image),
        )

    async def _completed(self, job: _Job, output: OmniRequestOutput, image: Image) -> str:
        return _event(
            f"{job.kind}.completed",
            b64_json=await self._requests.encode(job.file, image),
            usage=job.usage(image),
            **_common(job, output, image),
        )


def _common(job: _Job, output: OmniRequestOutput, image: Image) -> dict[str, Any]:
    return {
        "created_at": int(time.time()),
        "size": _size(image),
        "image_index": output.index,
        **job.settings,
    }


def _progress(job: _Job, output: OmniRequestOutput) -> str:
    assert output.progress is not None
    return _event(
        f"{job.kind}.progress",
        step=output.progress.step,
        num_steps=output.progress.num_steps,
        image_index=output.index,
    )


def _check_complete(images: dict[int, Image], num: int) -> None:
    if len(images) < num:
        raise RequestFailedError("the model gave no picture")


def _size(image: Image) -> str:
    return f"{image.width}x{image.height}"


def _event(kind: str, **fields: object) -> str:
    # A picture is megabytes of base64, which `json` takes its time over.
    data = msgspec.json.encode({"type": kind, **fields}).decode()
    return f"event: {kind}\ndata: {data}\n\n"
