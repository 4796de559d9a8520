"""vLLM's renderer of chat requests, for messages with media that we have checked ourselves."""

from __future__ import annotations

from typing import Any, Final

from vllm.exceptions import VLLMError
from vllm.renderers.online_renderer import OnlineRenderer

from vllm_omni.errors import BadRequestError

_PROCESSOR_ERRORS: Final = (ValueError, TypeError, LookupError, RuntimeError)
"""What a model's processor raises for media that it cannot take: too small, too narrow, not where
the prompt says. Nothing but the request's own messages reaches it."""


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
            return await super().preprocess_chat(*args, **kwargs)
        except (BadRequestError, VLLMError):
            raise
        except _PROCESSOR_ERRORS as error:
            text = " ".join(str(error).split())[:300] or type(error).__name__
            raise BadRequestError(
                f"the model cannot take these messages: {text}", field="messages"
            ) from error
