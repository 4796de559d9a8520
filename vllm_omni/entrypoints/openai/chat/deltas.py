"""Events of a plain streamed answer: one choice of text, and nothing told of its tokens.

vLLM's generator builds and validates three objects for each event, which is a third of what the API
process does for a token. Here an event between the first and the last is two constants and the
encoded text. The last output goes through vLLM's generator, which writes the finish, the usage and
errors; so it is told of all tokens at once.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import msgspec

from vllm_omni.errors import OmniError

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

Writer = Callable[[AsyncIterator["RequestOutput"]], AsyncGenerator[str, None]]
"""vLLM's generator of events, for one request."""

_PLACE: Final = "\0"


def is_plain(request: ChatCompletionRequest) -> bool:
    """Whether events between the first and the last hold text alone. Parsers are not looked at."""
    options = request.stream_options
    return not (
        (request.n or 1) > 1
        or request.logprobs
        or request.echo
        or request.use_beam_search
        or request.return_token_ids
        or request.return_prompt_text
        or (options is not None and options.include_usage and options.continuous_usage_stats)
    )


class PlainAnswer:
    """The events of one answer."""

    def __init__(self, request_id: str, model: str, role: str) -> None:
        self._created = int(time.time())
        envelope = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": model,
        }
        first = {"choices": [_choice({"role": role, "content": ""})]}
        self._role = _event({**envelope, **first, "prompt_token_ids": None, "prompt_text": None})
        delta = {**_choice({"content": _PLACE}), "token_ids": None}
        place = msgspec.json.encode(_PLACE)
        self._before, self._after = _event({**envelope, "choices": [delta]}).split(place)
        self._token_ids: list[int] = []

    async def events(
        self, outputs: AsyncGenerator[RequestOutput, None], write: Writer
    ) -> AsyncGenerator[bytes, None]:
        """All events in order. Closing this closes `outputs`."""
        async with aclosing(outputs):
            last: RequestOutput | None = None
            error: OmniError | None = None
            is_begun = False
            try:
                async for output in outputs:
                    last = output
                    if not is_begun:
                        is_begun = True
                        yield self._role
                    (choice,) = output.outputs
                    if choice.finish_reason is not None:
                        break
                    if choice.text or choice.token_ids or self._token_ids:
                        self._token_ids += choice.token_ids
                        yield b"".join(
                            (self._before, msgspec.json.encode(choice.text), self._after)
                        )
            except OmniError as failure:  # vLLM's generator tells of it
                error = failure
            async with aclosing(write(self._rest(last, outputs, error))) as ending:
                async for event in ending:
                    if is_begun and error is None:
                        is_begun = False  # its first event is the role again
                        continue
                    yield self._as_created(event)

    async def _rest(
        self,
        last: RequestOutput | None,
        outputs: AsyncGenerator[RequestOutput, None],
        error: OmniError | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """What vLLM's generator reads: the last output with the tokens of all before it."""
        if error is not None:
            raise error
        if last is not None:
            (choice,) = last.outputs
            whole = copy.copy(last)
            if choice.finish_reason is None:  # it was written already, and nothing came after it
                rest = dataclasses.replace(choice, text="", token_ids=self._token_ids)
            else:
                token_ids = [*self._token_ids, *choice.token_ids]
                rest = dataclasses.replace(choice, token_ids=token_ids)
            whole.outputs = [rest]
            yield whole
        async for output in outputs:
            yield output

    def _as_created(self, event: str) -> bytes:
        """An event of vLLM's with the time that the others have."""
        if not event.startswith('data: {"id"'):
            return event.encode()
        chunk: dict[str, Any] = msgspec.json.decode(event[6:])
        return _event({**chunk, "created": self._created})


def _choice(delta: dict[str, str]) -> dict[str, object]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


def _event(chunk: dict[str, object]) -> bytes:
    return b"".join((b"data: ", msgspec.json.encode(chunk), b"\n\n"))
