"""vLLM's renderer of chat requests, for messages with media that we have checked ourselves."""

from __future__ import annotations

from typing import Any, Final

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMClientError, VLLMError, VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer

from vllm_omni.errors import BadRequestError

_PROCESSOR_ERRORS: Final = (ValueError, TypeError, LookupError, RuntimeError)
"""What a model's processor raises for media that it cannot take: too small, too narrow, not where
the prompt says. Nothing but the request's own messages reaches it."""
_FIELDS: Final = frozenset(ChatCompletionRequest.model_fields)


class ChatRenderer(OnlineRenderer):  # type: ignore[misc]
    """A copy of the app's renderer, whose refusals of messages name them."""

    @classmethod
    def of(cls, made: OnlineRenderer) -> ChatRenderer:
        """With everything that vLLM resolved for its own."""
        renderer = cls.__new__(cls)
        renderer.__dict__.update(made.__dict__)
        # vLLM trusts a request with all options of its processors or with none; we look at each.
        renderer.trust_request_mm_kwargs = True
        return renderer

    async def preprocess_chat(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's.

        Raises:
            BadRequestError: the model's processor cannot take the messages.
        """
        try:
            conversation, inputs = await super().preprocess_chat(*args, **kwargs)
        except BadRequestError:
            raise
        except VLLMError as error:
            if not isinstance(error, VLLMClientError) or _names_a_field(error):
                raise
            raise BadRequestError(_line(error), field="messages") from error
        except _PROCESSOR_ERRORS as error:
            raise BadRequestError(
                f"the model cannot take these messages: {_line(error)}", field="messages"
            ) from error
        limit = self.model_config.max_model_len
        for one in inputs:
            # Media count with the places that they take, which vLLM's check before does not see.
            if (length := len(one.get("prompt_token_ids", ()))) >= limit:
                raise BadRequestError(
                    f"the messages have {length} tokens, media included; with at least one to "
                    f"write this is more than the model's {limit}",
                    field="messages",
                )
        return conversation, inputs


def _names_a_field(error: VLLMClientError) -> bool:
    """Whether an error names a field of the request, and nothing that the renderer calls so."""
    return isinstance(error, VLLMValidationError) and error.parameter in _FIELDS


def _line(error: Exception) -> str:
    text = error.args[0] if isinstance(error, VLLMValidationError) else error
    return " ".join(str(text).split())[:300] or type(error).__name__
