"""From a request's pictures to pixels: cheap checks of all, then fetch, then decode."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_omni.config.deploy import ServerLimits
from vllm_omni.config.pipeline import Modality
from vllm_omni.entrypoints.openai.input_memory import hold
from vllm_omni.entrypoints.openai.media.fetch import MediaFetcher
from vllm_omni.entrypoints.openai.media.images import ImageLimits, decode_image, decode_mask
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.entrypoints.openai.media.sources import (
    EncodedMedia,
    check_base64_size,
    decode_base64,
    split_data_url,
    too_large,
)
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import ImageInput


@dataclass(frozen=True, slots=True)
class ImageSource:
    """One picture as a request brings it: uploaded bytes, a base64 text or an http(s) URL."""

    field: str
    """Path in the request, as in `image[1]`."""
    data: bytes | None = None
    base64: str | None = None
    url: str | None = None


@dataclass(frozen=True, slots=True)
class InputImages:
    """What a request brings to start from."""

    images: tuple[ImageSource, ...] = ()
    mask: ImageSource | None = None


def image_source_from_url(url: str, field: str) -> ImageSource:
    """A `data:` URL is its base64 text; anything else is fetched."""
    if url[:5].lower() == "data:":
        return ImageSource(field, base64=split_data_url(url, field, Modality.IMAGE))
    return ImageSource(field, url=url)


class ImageLoader:
    """Turns pictures of a request into pixels within the operator's limits."""

    def __init__(self, limits: ServerLimits, fetcher: MediaFetcher, pool: MediaPool) -> None:
        self._max_bytes = limits.max_image_bytes
        self._max_items = limits.max_media_items
        self._limits = ImageLimits(limits.max_image_bytes, limits.max_image_pixels)
        self._fetcher = fetcher
        self._pool = pool

    def check(self, given: InputImages, field: str = "image") -> None:
        """Refuse by count, size and address. Decodes nothing and connects nowhere."""
        if len(given.images) > self._max_items:
            raise BadRequestError(
                f"the request has {len(given.images)} images, "
                f"at most {self._max_items} are allowed",
                field=field,
            )
        for source in (*given.images, *([given.mask] if given.mask else [])):
            if source.data is not None:
                self._check_bytes(source)
            elif source.base64 is not None:
                check_base64_size(source.base64, self._max_bytes, source.field, Modality.IMAGE)
            else:
                self._fetcher.check(source.url or "", source.field)

    async def load(self, given: InputImages) -> tuple[tuple[ImageInput, ...], ImageInput | None]:
        """Pixels of the pictures, in order, and of the mask.

        Raises:
            BadRequestError: names the picture's place in the request.
        """
        images = []
        for source in given.images:
            image = await self._pool.run(decode_image, await self._read(source), self._limits)
            hold(image.pixels.nbytes, source.field)
            images.append(image)
        if given.mask is None:
            return tuple(images), None
        mask = await self._pool.run(decode_mask, await self._read(given.mask), self._limits)
        hold(mask.pixels.nbytes, given.mask.field)
        if images and mask.size != images[0].size:
            raise BadRequestError(
                f"the mask has {_size(mask)} pixels, the image {_size(images[0])}",
                field=given.mask.field,
            )
        return tuple(images), mask

    async def _read(self, source: ImageSource) -> EncodedMedia:
        if source.data is not None:
            data = source.data
        elif source.base64 is not None:
            data = await self._pool.run(
                decode_base64, source.base64, self._max_bytes, source.field, Modality.IMAGE
            )
        else:
            data = await self._fetcher.fetch(source.url or "", self._max_bytes, source.field)
        return EncodedMedia(data, source.field)

    def _check_bytes(self, source: ImageSource) -> None:
        if not source.data:
            raise BadRequestError("the image is empty", field=source.field)
        if len(source.data) > self._max_bytes:
            raise too_large(self._max_bytes, source.field, Modality.IMAGE)


def _size(image: ImageInput) -> str:
    width, height = image.size
    return f"{width}x{height}"
