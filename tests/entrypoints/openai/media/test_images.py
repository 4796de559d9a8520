"""Pictures as files: read back as they were, by a reader that did not write them."""

from __future__ import annotations

import io

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
