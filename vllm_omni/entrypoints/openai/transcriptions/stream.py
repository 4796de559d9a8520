"""Streamed transcripts that both vLLM's clients and OpenAI's read."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

_PREFIX: Final = "data: {"
_DONE: Final = "data: [DONE]\n\n"


async def with_openai_events(
    events: AsyncGenerator[str, None],
) -> AsyncGenerator[str, None]:
    """vLLM's chunks, each also a `transcript.text.delta`; before the end `transcript.text.done`."""
    text, last, failed = "", None, False
    async with aclosing(events):
        async for event in events:
            if event == _DONE and last is not None and not failed:
                done = {"type": "transcript.text.done", "text": text, "choices": []}
                yield _event({**last, **done})
            if not event.startswith(_PREFIX):
                yield event
                continue
            chunk: dict[str, Any] = json.loads(event[len(_PREFIX) - 1 :])
            failed = failed or "error" in chunk
            if not failed:
                last = {name: chunk[name] for name in ("id", "object", "created", "model")}
                delta = "".join(choice["delta"]["content"] for choice in chunk["choices"])
                text += delta
                chunk |= {"type": "transcript.text.delta", "delta": delta}
            yield _event(chunk)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
