"""Text completions: vLLM's serving class, bound to one request at a time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.request_scope import EventStream, RequestScope
from vllm_omni.entrypoints.openai.serving import OmniErrorsMixin, answer_of, parse_model

if TYPE_CHECKING:
    from fastapi import Request


class OmniServingCompletion(OmniErrorsMixin, OpenAIServingCompletion):  # type: ignore[misc]
    """One instance serves; a shallow copy of it is bound to each request."""

    engine_client: OmniEngineClient

    def __init__(self, defaults: Mapping[str, Any], **kwargs: Any) -> None:
        """`defaults` are the stage's own, under what a request says."""
        super().__init__(**kwargs)
        self.default_sampling_params: dict[str, Any] = {
            **self.model_config.get_diff_sampling_param(),
            **defaults,
        }

    async def create(
        self, body: dict[str, Any], raw_request: Request
    ) -> CompletionResponse | EventStream:
        """Complete a prompt; a stream is returned when its first output is there."""
        request = parse_model(CompletionRequest, body)
        prompts = request.prompt
        is_batch = isinstance(prompts, list) and not all(isinstance(one, int) for one in prompts)
        self.engine_client.check_places(
            (request.n or 1) * (len(prompts) if is_batch else 1), "prompt" if is_batch else "n"
        )
        scope = RequestScope()
        bound = copy.copy(self)
        bound.engine_client = self.engine_client.for_request(scope)
        try:
            answer = answer_of(await bound.create_completion(request, raw_request))
            if isinstance(answer, CompletionResponse):
                return answer
            await scope.prime()
        except BaseException:
            await scope.aclose()
            raise
        return EventStream(answer, scope)
