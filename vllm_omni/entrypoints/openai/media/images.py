"""Pictures in and out: read within bounds that are checked in the header, written as files.

Runs in the media pool.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from vllm_omni.entrypoints.openai.media.png import encode_png
from vllm_omni.entrypoints.openai.media.sources import EncodedMedia
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import ImageInput

if TYPE_CHECKING:
    from collections.abc import Sequence

INPUT_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
OutputFormat = Literal["png", "jpeg", "webp"]
_MAX_SIDE: Final = 16_384
_DEFAULT_COMPRESSION: Final = 100
_REPAINT: Final = 255


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What one picture may cost."""

    max_bytes: int
    max_pixels: int


def decode_image(media: EncodedMedia, limits: ImageLimits) -> ImageInput:
    """RGB pixels, upright.

    Raises:
        BadRequestError: names `media.field`; nothing over the limits was decoded.
    """
    return ImageInput(np.asarray(_load(media, limits).convert("RGB")))


def decode_mask(media: EncodedMedia, limits: ImageLimits) -> ImageInput:
    """A mask by its transparent pixels, or without any by its white ones: those are painted anew.

    Raises:
        BadRequestError: names `media.field`.
    """
    image = _load(media, limits)
    if image.has_transparency_data:
        alpha = np.asarray(image.convert("RGBA"))[:, :, 3]
        if alpha.min() < _REPAINT:
            return ImageInput(np.where(alpha == 0, _REPAINT, 0).astype(np.uint8))
    return ImageInput(np.asarray(image.convert("L")))


def _load(media: EncodedMedia, limits: ImageLimits) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(media.data), formats=INPUT_FORMATS)
        width, height = image.size
        if width * height > limits.max_pixels or max(width, height) > _MAX_SIDE:
            raise BadRequestError(
                f"the image has {width}x{height} pixels, at most {limits.max_pixels} are read",
                field=media.field,
            )
        image.load()
        return ImageOps.exif_transpose(image)
    except BadRequestError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        raise BadRequestError("the image has too many pixels", field=media.field) from exc
    except UnidentifiedImageError as exc:
        names = ", ".join(name.lower() for name in INPUT_FORMATS)
        raise BadRequestError(
            f"the data is no image that this server reads ({names})", field=media.field
        ) from exc
    except Exception as exc:
        # The codecs raise what they like, and the file is a client's: this request fails alone.
        raise BadRequestError("the image is cut off or damaged", field=media.field) from exc


def encode_image(image: Image.Image, form: OutputFormat, compression: int | None = None) -> bytes:
    """One file. `compression` is OpenAI's for jpeg and webp: 100 keeps most."""
    if form == "png":
        return encode_png(np.asarray(image if image.mode == "RGB" else image.convert("RGB")))
    buffer = io.BytesIO()
    if form == "jpeg":
        quality = _DEFAULT_COMPRESSION if compression is None else compression
        # Above 95 a JPEG only grows.
        image.convert("RGB").save(buffer, "JPEG", quality=min(max(quality, 1), 95))
    else:
        quality = _DEFAULT_COMPRESSION if compression is None else compression
        image.save(buffer, "WEBP", quality=quality, method=2)
    return buffer.getvalue()


def contact_sheet(frames: Sequence[Image.Image], num_columns: int = 5) -> Image.Image:
    """Small pictures in rows."""
    width, height = frames[0].size
    num_rows = -(-len(frames) // num_columns)
    sheet = Image.new("RGB", (width * min(num_columns, len(frames)), height * num_rows))
    for i, frame in enumerate(frames):
        sheet.paste(frame, (i % num_columns * width, i // num_columns * height))
    return sheet
