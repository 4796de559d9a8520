"""PNG files are read back as they were by a reader that is not ours."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from vllm_omni.entrypoints.openai.media.png import encode_png


@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (1, 7), (7, 1), (3, 5), (513, 700), (1024, 1024)]
)
def test_pixels_are_what_they_were(height: int, width: int) -> None:
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    pixels[height // 2 :] = 255

    image = Image.open(io.BytesIO(encode_png(pixels)))

    assert image.format == "PNG"
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), pixels)


def test_pixels_in_another_order_of_memory_are_read_too() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 6, 3), dtype=np.uint8)
    turned = pixels.transpose(1, 0, 2)

    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encode_png(turned)))), turned)


def test_areas_of_one_colour_take_no_room() -> None:
    assert len(encode_png(np.full((1024, 1024, 3), 200, np.uint8))) < 50_000
