"""Token streams: what an autoregressive replica pushes straight to the next stage's replica.

One stream per request and target. A frame carries the token ids of one step, or the codes that the
model made of them; a stream that conditions another stage begins with the prompt and carries
captured rows too. Every stream ends with a reason. Called from the core's busy loop only, and never
blocks it: the sender queues. What fails here fails the streams of one request. Only `open` raises:
an error in the busy loop is the end of the core, with every request it holds.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from vllm_omni.core.conditioning import KIND_CODES, KIND_PROMPT, KIND_TOKENS
from vllm_omni.core.payloads import StepPayload, take_payloads
from vllm_omni.distributed.omni_connectors.base import Sender
from vllm_omni.engine.messages import StreamTarget

logger = logging.getLogger(__name__)

TARGETS_KEY: Final = "omni_targets"
"""Key of `SamplingParams.extra_args`: `[[address, stream, conditions], ...]`."""

TOKENS_META: Final = {"kind": KIND_TOKENS}
"""Meta of a frame whose payload is uint32 little-endian token ids."""
PROMPT_META: Final = {"kind": KIND_PROMPT}

_END_REASONS: Final = {
    FinishReason.STOP: "stop",
    FinishReason.REPETITION: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


def targets_of(params: SamplingParams | None) -> list[StreamTarget]:
    """Where a request is to be pushed to."""
    extra = params.extra_args if params is not None else None
    return [StreamTarget(*target) for target in (extra or {}).get(TARGETS_KEY, ())]


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as uint32 little-endian."""
    return array("I", token_ids).tobytes()


@dataclass(frozen=True, slots=True)
class _Route:
    streams: tuple[str, ...]
    conditioning: tuple[str, ...]
    """Those of them that also carry the prompt and captured rows."""
    keeps_stop_token: bool
    """The stop token belongs to the text (`include_stop_str_in_output`)."""


class TokenStreams:
    """The open streams of one replica, by engine request id."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._routes: dict[str, _Route] = {}

    def __repr__(self) -> str:
        return f"<TokenStreams open={len(self._routes)}>"

    def open(
        self, request_id: str, params: SamplingParams | None, prompt: Sequence[int] | None = None
    ) -> None:
        """Announce the streams of a request that has targets; nothing for one that has none.

        `prompt`: its token ids, for the streams that condition another stage.

        Raises:
            Exception: a stream cannot be opened; those that were are failed.
        """
        targets = targets_of(params)
        if not targets or params is None:
            return
        streams = tuple(target.stream for target in targets)
        conditioning = tuple(target.stream for target in targets if target.conditions)
        self._routes[request_id] = _Route(streams, conditioning, params.include_stop_str_in_output)
        try:
            for target in targets:
                self._sender.open(target.address, target.stream)
            for stream in conditioning:
                self._sender.push(stream, encode_tokens(prompt or ()), PROMPT_META)
        except Exception:
            self.fail([request_id], "a stream of this request could not be opened")
            raise

    def push(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Push the new tokens of one step, and end the streams of requests that finished."""
        with self._sender.together():
            for output in outputs:
                payloads = take_payloads(output)
                route = self._routes.get(output.request_id)
                if route is None:
                    continue
                try:
                    self._push(route, output, payloads)
                except Exception:  # the boundary of one request's streams: its text goes on
                    logger.exception("tokens of request %s could not be sent", output.request_id)
                    self.fail([output.request_id], "its tokens could not be sent")

    def _push(
        self, route: _Route, output: EngineCoreOutput, payloads: Sequence[StepPayload]
    ) -> None:
        token_ids = output.new_token_ids
        # Inside the core only a stop token ends with STOP, and its text is not output.
        drops_last = output.finish_reason is FinishReason.STOP and not route.keeps_stop_token
        if drops_last:
            token_ids = token_ids[:-1]
        is_coded = False
        for payload in payloads:
            if payload.meta["kind"] != KIND_CODES:
                self._send(route.conditioning, payload)
                continue
            is_coded = True
            if not drops_last:
                self._send(route.streams, payload)
        if token_ids and not is_coded:
            encoded = encode_tokens(token_ids)
            for stream in route.streams:
                self._sender.push(stream, encoded, TOKENS_META)
        if output.finish_reason is not None:
            self.finish([output.request_id], output.finish_reason)

    def _send(self, streams: Sequence[str], payload: StepPayload) -> None:
        buffer = np.ascontiguousarray(payload.data).data.cast("B") if streams else b""
        for stream in streams:
            self._sender.push(stream, buffer, payload.meta)

    def refuse(self, params: SamplingParams | None, message: str) -> None:
        """Fail the streams of a request that was never opened. Callable from any thread."""
        try:
            for target in targets_of(params):
                self._sender.open(target.address, target.stream)
                self._sender.fail(target.stream, message)
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
