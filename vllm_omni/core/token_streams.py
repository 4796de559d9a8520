"""Token streams: what an autoregressive replica pushes straight to the next stage's replica.

One stream per request and target. A frame carries the token ids of one step; every stream ends
with a reason. Called from the core's busy loop only, and never blocks it: the sender queues.
What fails here fails the streams of one request. Only `open` raises: an error in the busy loop is
the end of the core, with every request it holds.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from vllm_omni.distributed.omni_connectors.base import Sender

logger = logging.getLogger(__name__)

TARGETS_KEY: Final = "omni_targets"
"""Key of `SamplingParams.extra_args`: `[[address, stream], ...]`."""

TOKENS_META: Final = {"kind": "tokens"}
"""Meta of a frame whose payload is uint32 little-endian token ids."""

_END_REASONS: Final = {
    FinishReason.STOP: "stop",
    FinishReason.REPETITION: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


def targets_of(params: SamplingParams | None) -> list[tuple[str, str]]:
    """Addresses and stream ids a request is to be pushed to."""
    extra = params.extra_args if params is not None else None
    return [(address, stream) for address, stream in (extra or {}).get(TARGETS_KEY, ())]


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as uint32 little-endian."""
    return array("I", token_ids).tobytes()


@dataclass(frozen=True, slots=True)
class _Route:
    streams: tuple[str, ...]
    keeps_stop_token: bool
    """The stop token belongs to the text (`include_stop_str_in_output`)."""


class TokenStreams:
    """The open streams of one replica, by engine request id."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._routes: dict[str, _Route] = {}

    def __repr__(self) -> str:
        return f"<TokenStreams open={len(self._routes)}>"

    def open(self, request_id: str, params: SamplingParams | None) -> None:
        """Announce the streams of a request that has targets; nothing for one that has none.

        Raises:
            Exception: a stream cannot be opened; those that were are failed.
        """
        targets = targets_of(params)
        if not targets or params is None:
            return
        streams = tuple(stream for _, stream in targets)
        self._routes[request_id] = _Route(streams, params.include_stop_str_in_output)
        try:
            for address, stream in targets:
                self._sender.open(address, stream)
        except Exception:
            self.fail([request_id], "a stream of this request could not be opened")
            raise

    def push(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Push the new tokens of one step, and end the streams of requests that finished."""
        for output in outputs:
            route = self._routes.get(output.request_id)
            if route is None:
                continue
            try:
                self._push(route, output)
            except Exception:  # the boundary of one request's streams: its text goes on
                logger.exception("tokens of request %s could not be sent", output.request_id)
                self.fail([output.request_id], "its tokens could not be sent")

    def _push(self, route: _Route, output: EngineCoreOutput) -> None:
        token_ids = output.new_token_ids
        if output.finish_reason is FinishReason.STOP and not route.keeps_stop_token:
            # Inside the core only a stop token ends with STOP, and its text is not output.
            token_ids = token_ids[:-1]
        if token_ids:
            payload = encode_tokens(token_ids)
            for stream in route.streams:
                self._sender.push(stream, payload, TOKENS_META)
        if output.finish_reason is not None:
            self.finish([output.request_id], output.finish_reason)

    def refuse(self, params: SamplingParams | None, message: str) -> None:
        """Fail the streams of a request that was never opened. Callable from any thread."""
        try:
            for address, stream in targets_of(params):
                self._sender.open(address, stream)
                self._sender.fail(stream, message)
        except Exception:  # the boundary of one request's streams
            logger.exception("the streams of a refused request could not be failed")

    def finish(self, request_ids: Iterable[str], reason: FinishReason) -> None:
        """End the streams of these requests as the core ended the requests."""
        if reason is FinishReason.ERROR:
            self.fail(request_ids, "the engine failed this request")
        else:
            self.end(request_ids, _END_REASONS[reason])

    def end(self, request_ids: Iterable[str], reason: str) -> None:
        """End the streams of these requests; ids without streams are ignored."""
        self._leave(request_ids, lambda stream: self._sender.end(stream, reason))

    def fail(self, request_ids: Iterable[str], message: str) -> None:
        """End the streams of these requests with an error; ids without streams are ignored."""
        self._leave(request_ids, lambda stream: self._sender.fail(stream, message))

    def _leave(self, request_ids: Iterable[str], leave: Callable[[str], None]) -> None:
        for request_id in request_ids:
            route = self._routes.pop(request_id, None)
            for stream in route.streams if route is not None else ():
                try:
                    leave(stream)
                except Exception:  # the boundary of one stream
                    logger.exception("stream %s could not be ended", stream)

    def close(self, message: str) -> None:
        """Fail what is still open."""
        self.fail(list(self._routes), message)
