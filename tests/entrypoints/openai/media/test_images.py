"""Pictures as files: read back as they were, by a reader that did not write them."""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
from PIL import Image

from vllm_omni.entrypoints.openai.media.images import encode_image


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 7), (7, 1), (3, 5), (513, 700)])
def test_a_png_has_the_pixels_of_its_picture(height: int, width: int) -> None:
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)

    image = Image.open(io.BytesIO(encode_image(Image.fromarray(pixels), "png")))

    assert (image.format, image.mode) == ("PNG", "RGB")
    assert np.array_equal(np.asarray(image), pixels)


def test_areas_of_one_colour_take_no_room() -> None:
    assert len(encode_image(Image.new("RGB", (1024, 1024), (200, 100, 0)), "png")) < 50_000


@pytest.mark.parametrize(("spread", "filter_type"), [(0, 2), (40, 3)])
def test_each_picture_has_the_filter_that_leaves_least(spread: int, filter_type: int) -> None:
    """Stripes down the picture are the row above again; noise is averaged."""
    stripes = np.tile(np.arange(64, dtype=np.int64) * 37 % 200, (64, 1))[:, :, None].repeat(3, 2)
    noise = np.random.default_rng(0).integers(0, spread + 1, stripes.shape)
    pixels = ((128 if spread else stripes) + noise).astype(np.uint8)
    file = encode_image(Image.fromarray(pixels), "png")

    with Image.open(io.BytesIO(file)) as image:
        assert np.array_equal(np.asarray(image), pixels)
    data = file[file.index(b"IDAT") + 4 : -16]
    assert zlib.decompress(data)[:: 1 + 64 * 3] == bytes([filter_type]) * 64


def test_a_picture_with_transparency_is_written_without() -> None:
    file = encode_image(Image.new("RGBA", (4, 4), (1, 2, 3, 0)), "png")

    assert np.asarray(Image.open(io.BytesIO(file))).tolist() == [[[1, 2, 3]] * 4] * 4
