"""Which rows of which requests leave a stage that conditions others, and when."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from vllm_omni.config.pipeline import CaptureScope
from vllm_omni.core.conditioning import KIND_POSITIONS
from vllm_omni.core.payloads import StepPayload, as_array
from vllm_omni.core.token_streams import targets_of
from vllm_omni.worker.capture import Spans, StateCapture, spans_of
from vllm_omni.worker.conditioned_inputs import Scheduled
from vllm_omni.worker.stage_options import StageOptions

_ALL: Final = sys.maxsize


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """What is asked of a request whose prompt has been read."""

    num_tokens: int
    mm_features: Sequence[Any]
    """vLLM's `MultiModalFeatureSpec`s."""
    positions: Callable[[], torch.Tensor | None]
    """Rotary positions `[3, tokens]`; None: 0, 1, 2, ... Asked for prompts with media alone."""


@dataclass(frozen=True, slots=True)
class DueRows:
    """What is sent of one request with a step."""

    row: int
    """In the batch."""
    part: Scheduled
    spans: Spans
    payloads: list[StepPayload]
    """What goes before the rows."""

    @property
    def is_of_this_step(self) -> bool:
        """Whether all of the rows were computed in the step that sends them, and no other was."""
        return self.spans == [[self.part.first, self.part.count]]


class SentRows:
    """How far each request's rows have left. A preempted request goes on where it was."""

    def __init__(self, scope: CaptureScope) -> None:
        self._scope = scope
        self._num_sent: dict[str, int] = {}
        """Positions whose rows have left, by request that has rows to send."""

    def __repr__(self) -> str:
        return f"<SentRows {self._scope} requests={len(self._num_sent)}>"

    @property
    def is_idle(self) -> bool:
        """No request has rows to send."""
        return not self._num_sent

    def begin(self, request_id: str, params: Any) -> None:
        """Note a request, if its `SamplingParams` name a stage that wants its rows."""
        if any(target.conditions for target in targets_of(params)):
            self._num_sent.setdefault(request_id, 0)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forget requests; others than those noted are ignored."""
        for request_id in request_ids:
            self._num_sent.pop(request_id, None)

    def due(
        self, batch: Sequence[Scheduled], prompt_of: Callable[[str], ReadPrompt]
    ) -> list[DueRows]:
        """What is sent with a step, and counts as sent from now on."""
        found = []
        for row, part in enumerate(batch):
            num_sent = self._num_sent.get(part.request_id, _ALL)
            num_computed = part.first + part.count
            if num_computed <= num_sent:
                continue
            prompt = prompt_of(part.request_id)
            if num_computed >= prompt.num_tokens:
                found.append(self._due(row, part, num_sent, prompt))
        return found

    def _due(self, row: int, part: Scheduled, num_sent: int, prompt: ReadPrompt) -> DueRows:
        payloads = []
        if not num_sent and prompt.mm_features:
            positions = prompt.positions()
            if positions is not None:
                payloads.append(_positions_payload(positions))
        if self._scope is CaptureScope.ALL:
            num_computed = part.first + part.count
            spans = [[num_sent, num_computed - num_sent]]
            self._num_sent[part.request_id] = num_computed
        else:
            spans = _media_spans(prompt.mm_features)
            self._num_sent[part.request_id] = _ALL
        return DueRows(row, part, spans, payloads)


def rows_of_stage(options: StageOptions) -> tuple[StateCapture | None, SentRows | None]:
    """What is kept of a stage's forward and what leaves of it; none where it conditions none."""
    if options.capture_layers is None or options.capture_scope is None:
        return None, None
    capture = StateCapture(options.capture_layers, options.capture_scope)
    return capture, SentRows(options.capture_scope)


def _media_spans(features: Iterable[Any]) -> Spans:
    """Positions of the prompt that are filled with media."""
    positions: list[int] = []
    for feature in features:
        place = feature.mm_position
        positions += [
            place.offset + i
            for i in range(place.length)
            if place.is_embed is None or place.is_embed[i]
        ]
    return spans_of(sorted(set(positions)))


def _positions_payload(positions: torch.Tensor) -> StepPayload:
    data, _ = as_array(positions.to(torch.int32).cpu())
    return StepPayload({"kind": KIND_POSITIONS}, data)
