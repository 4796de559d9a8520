"""What a picture costs, in OpenAI's `usage`.

A diffusion model has no tokens that all models count alike: a picture counts one for each 16x16
pixels, which is what most transformers see, and a text one for each character.
"""

from __future__ import annotations

from typing import Any, Final

_PATCH_PIXELS: Final = 16


def patches(width: int, height: int) -> int:
    """What a picture counts."""
    return -(-width // _PATCH_PIXELS) * -(-height // _PATCH_PIXELS)


def usage_of(prompt: str, num_input_tokens: int, num_output_tokens: int) -> dict[str, Any]:
    """`usage` of an answer; the numbers are those of pictures."""
    num_in = len(prompt) + num_input_tokens
    return {
        "input_tokens": num_in,
        "input_tokens_details": {"text_tokens": len(prompt), "image_tokens": num_input_tokens},
        "output_tokens": num_output_tokens,
        "output_tokens_details": {"text_tokens": 0, "image_tokens": num_output_tokens},
        "total_tokens": num_in + num_output_tokens,
    }
