"""What would end vLLM's whole engine core, refused before it gets there.

A request that is empty, too long, or names tokens the model has not, is not an error inside the
core but the end of it, with every request it holds. Applied to every request, whoever made it.
"""

from __future__ import annotations

import msgspec
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_omni.errors import BadRequestError


def refuse_fatal(request: EngineCoreRequest, vllm_config: VllmConfig) -> None:
    """Raise BadRequestError for a request that the core would die or hang of."""
    model_config = vllm_config.model_config
    params = request.sampling_params
    if params is not None and params.max_tokens is not None and params.max_tokens < 1:
        raise BadRequestError(
            f"max_tokens must be at least 1, got {params.max_tokens}", field="max_tokens"
        )
    if params is not None:
        _check_numbers(params)
    num_tokens = len(request.prompt_token_ids or ())
    if request.prompt_embeds is not None:
        _check_embeds(request, vllm_config)
        num_tokens = len(request.prompt_embeds)
    if num_tokens == 0:
        raise BadRequestError("the prompt is empty", field="prompt")
    if num_tokens >= model_config.max_model_len:
        raise BadRequestError(
            f"the prompt has {num_tokens} tokens; with at least one to write this is more than "
            f"the model's {model_config.max_model_len}",
            field="prompt",
        )
    _check_vocabulary(request, model_config.get_vocab_size())


def _check_numbers(params: SamplingParams) -> None:
    """Refuse integers that no message to the core can hold, wherever they stand."""
    if _can_be_sent(params):
        return
    for name in params.__struct_fields__:
        if not _can_be_sent(getattr(params, name)):
            raise BadRequestError(f"{name} is out of range", field=name)


def _can_be_sent(value: object) -> bool:
    try:
        msgspec.msgpack.encode(value, enc_hook=lambda other: None)
    except OverflowError:
        return False
    return True


def _check_embeds(request: EngineCoreRequest, vllm_config: VllmConfig) -> None:
    shape = tuple(request.prompt_embeds.shape)
    model_config = vllm_config.model_config
    if not model_config.enable_prompt_embeds:
        raise BadRequestError("prompt embeddings are not enabled", field="prompt_embeds")
    width = model_config.get_inputs_embeds_size()
    if len(shape) != 2 or shape[1] != width:
        raise BadRequestError(
            f"prompt embeddings must have shape [tokens, {width}], got {list(shape)}",
            field="prompt_embeds",
        )


def _check_vocabulary(request: EngineCoreRequest, vocab_size: int) -> None:
    token_ids = request.prompt_token_ids
    if not token_ids:
        return
    if min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    # Placeholders of media may lie outside: their embeddings are replaced, never looked up.
    ranges = [feature.mm_position for feature in request.mm_features or ()]
    for position, token_id in enumerate(token_ids):
        replaced = any(r.offset <= position < r.offset + r.length for r in ranges)
        if not 0 <= token_id < vocab_size and not replaced:
            raise BadRequestError(
                f"token id {token_id} is outside the vocabulary of {vocab_size}", field="prompt"
            )
