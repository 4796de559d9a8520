"""The requests one autoregressive replica holds, and how their outputs are put in order.

A stage request has parts (one per prompt); a part has segments (one engine request for each clip
of a long audio). Outputs leave part by part, and the texts of a part's segments are joined.
Plain state: no sockets, no loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from vllm_omni.engine.messages import StageOutput


@dataclass(slots=True)
class _Segment:
    waiting: RequestOutput | None = None
    """What arrived before its turn, merged in one slot."""
    finished: bool = False


@dataclass(slots=True)
class _Choice:
    """What earlier segments wrote for one of the `n` choices."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    needs_separator: bool = False


class PartOutputs:
    """Puts the outputs of one part's segments in order and joins them."""

    def __init__(self, kind: RequestOutputKind, num_segments: int, separator: str) -> None:
        self._kind = kind
        self._segments = [_Segment() for _ in range(num_segments)]
        self._separator = separator
        self._current = 0
        self._earlier: dict[int, _Choice] = {}

    @property
    def finished(self) -> bool:
        return self._current == len(self._segments)

    def put(self, segment: int, output: RequestOutput) -> None:
        slot = self._segments[segment]
        slot.finished = output.finished
        if slot.waiting is None:
            slot.waiting = output
        else:
            slot.waiting.add(output, aggregate=self._kind is RequestOutputKind.DELTA)

    def take(self) -> Iterator[RequestOutput]:
        """What may leave now: the current segment's output, then those that it held up."""
        while not self.finished:
            slot = self._segments[self._current]
            output, slot.waiting = slot.waiting, None
            is_last = self._current == len(self._segments) - 1
            if output is not None and len(self._segments) > 1:
                for completion in output.outputs:
                    self._join(completion, slot.finished, is_last)
                output.finished = slot.finished and is_last
            if slot.finished:
                self._current += 1
            if output is not None and self._leaves(output):
                yield output
            if not slot.finished:
                return

    def _leaves(self, output: RequestOutput) -> bool:
        return output.finished or self._kind is not RequestOutputKind.FINAL_ONLY

    def _join(self, completion: CompletionOutput, is_end: bool, is_last: bool) -> None:
        """Put what earlier segments wrote in front, and remember this one's when it ended."""
        earlier = self._earlier.setdefault(completion.index, _Choice())
        if self._kind is RequestOutputKind.DELTA:
            if earlier.needs_separator and completion.text:
                completion.text = self._separator + completion.text
                earlier.needs_separator = False
            if completion.text:
                earlier.text = completion.text
            earlier.needs_separator = earlier.needs_separator or (is_end and bool(earlier.text))
        else:
            texts = (earlier.text, completion.text)
            completion.text = self._separator.join(text for text in texts if text)
            completion.token_ids = [*earlier.token_ids, *completion.token_ids]
            if is_end:
                earlier.text, earlier.token_ids = completion.text, list(completion.token_ids)
        if not is_last:
            completion.finish_reason = completion.stop_reason = None


@dataclass(slots=True)
class RunningRequest:
    """One stage request of this replica."""

    request_id: str
    parts: list[PartOutputs]
    streams: bool = False
    """Its tokens go to other replicas."""
    is_constrained: bool = False
    """Its text must follow a grammar."""
    engine_ids: list[str] = field(default_factory=list)
    """Ids inside the core, those of `n` choices one by one."""
    parent_ids: set[str] = field(default_factory=set)
    """What groups the choices of one prompt."""
    keys: list[str] = field(default_factory=list)
    """What vLLM calls the external ids: one per segment."""
    deadline: asyncio.TimerHandle | None = None
    first_token_s: float | None = None
    """On `time.monotonic`; of a text that leaves whole, its first output comes much later."""
    _current: int = 0

    @property
    def finished(self) -> bool:
        return self._current == len(self.parts)

    def outputs(self, part: int, segment: int, output: RequestOutput) -> Iterator[StageOutput]:
        """Stage outputs that may leave after this one came, in the order of the parts."""
        self.parts[part].put(segment, output)
        while self._current < len(self.parts):
            current = self.parts[self._current]
            for ready in current.take():
                ready.request_id = self.request_id
                is_last = self._current == len(self.parts) - 1
                yield StageOutput(
                    self.request_id,
                    is_last and ready.finished,
                    ready,
                    first_made_s=self.first_token_s,
                )
            if not current.finished:
                return
            self._current += 1
