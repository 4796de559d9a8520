"""How the text stage of GLM-Image is asked, and how its tokens reach the denoiser.

Both run in the API process and import no torch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from vllm_omni.diffusion.checks import UPSTREAM
from vllm_omni.diffusion.models.glm_image.grids import Grids
from vllm_omni.errors import BadRequestError, RequestFailedError
from vllm_omni.inputs.prompt import OmniPrompt

if TYPE_CHECKING:
    from vllm_omni.diffusion.request import DiffusionRequest
    from vllm_omni.engine.messages import StageOutput

IMAGE_START: Final = "<|dit_token_16384|>"
"""The token that begins a picture, unless the stage's params name another one."""
IMAGE_START_KEY: Final = "image_start"
TOKENS: Final = "token_ids"
"""Key of a request's `upstream`: what the text stage wrote, both pictures one after the other."""


def ask_for_tokens(
    rendered: OmniPrompt, request: DiffusionRequest, params: Any
) -> tuple[OmniPrompt, Any]:
    """The prompt ends with the sizes of both pictures, and every token of both is written."""
    if rendered.text is None or request.height is None or request.width is None:
        raise BadRequestError("a picture needs a text and a size", field="prompt")
    grids = Grids.of_size(request.height, request.width)
    own = copy.copy(params)
    own.max_tokens = own.min_tokens = grids.num_small + grids.num_large
    own.detokenize = False
    start = (own.extra_args or {}).get(IMAGE_START_KEY, IMAGE_START)
    text = rendered.text + grids.as_text() + start
    return replace(rendered, text=text, engine_input=None), own


def hand_over_tokens(
    prompt: OmniPrompt, upstream: Mapping[str, Sequence[StageOutput]]
) -> OmniPrompt:
    """The client's text goes on to the glyph encoder, with the image tokens beside it."""
    ((output,),) = upstream.values()
    completions = output.text.outputs if output.text is not None else []
    if not completions:
        raise RequestFailedError("the text stage wrote no image tokens")
    tokens = tuple(completions[0].token_ids)
    return replace(prompt, extra={**prompt.extra, UPSTREAM: {TOKENS: tokens}})
