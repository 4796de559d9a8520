"""Places of image tokens, packed into the numbers that vLLM counts up."""

from __future__ import annotations

import pytest
import torch

from vllm_omni.diffusion.models.glm_image.grids import Grids
from vllm_omni.diffusion.models.glm_image.image_positions import fits, packed_delta, unpacked
from vllm_omni.errors import BadRequestError


def places(grids: Grids, prompt_length: int) -> list[tuple[int, int, int]]:
    """Row by row: the small picture, the large one, and the token that ends them."""
    found, begins = [], prompt_length
    for rows, columns in ((grids.small_rows, grids.small_columns), (grids.rows, grids.columns)):
        found += [(begins, begins + r, begins + c) for r in range(rows) for c in range(columns)]
        begins += max(rows, columns)
    return [*found, (begins, begins, begins)]


@pytest.mark.parametrize("size", [(64, 64), (64, 96), (2048, 512), (512, 1120), (4064, 32)])
@pytest.mark.parametrize("prompt_length", [1, 37, 65535])
def test_written_tokens_have_their_places(size: tuple[int, int], prompt_length: int) -> None:
    grids = Grids.of_size(*size)
    expected = places(grids, prompt_length)
    counted = torch.arange(prompt_length, prompt_length + len(expected))
    found = unpacked((counted + packed_delta(grids, prompt_length)).expand(3, -1))

    assert found.T.tolist() == [list(place) for place in expected]


def test_prompts_stand_where_they_are_beside_written_tokens() -> None:
    delta = packed_delta(Grids.of_size(64, 64), 5)
    counted = torch.tensor([0, 1, 5 + delta, 2, 6 + delta])

    assert unpacked(counted.expand(3, -1)).tolist() == [
        [0, 1, 5, 2, 5],
        [0, 1, 5, 2, 5],
        [0, 1, 5, 2, 6],
    ]


def test_a_prompt_names_the_pictures_at_its_end_only() -> None:
    grids = Grids.of_size(64, 96)
    text = f"draw <sop>1 1<eop><sop>2 2<eop> now{grids.as_text()}<|dit_token_16384|>"

    assert Grids.of_text("a fox" + grids.as_text()) == grids
    assert Grids.of_text(text) == grids
    assert Grids.of_text(f"{text} and more") is None
    assert Grids.of_text("a fox") is None


def test_what_is_too_large_is_refused_or_not_packed() -> None:
    assert not fits(Grids.of_size(64, 64), 1 << 16)
    assert not fits(Grids(128, 1, 1, 1), 5)
    with pytest.raises(BadRequestError, match="width must be 32 to 4064"):
        Grids.of_size(64, 8192)
