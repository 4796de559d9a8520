"""Payloads of a step on their way to the host, joined to vLLM's output when it is read.

Copies run on the device's stream beside the step; the one wait is that for the sampled tokens,
which vLLM makes anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_omni.core.conditioning import KIND_CODES
from vllm_omni.core.payloads import StepPayload
from vllm_omni.worker.capture import Captured


@dataclass(slots=True)
class CodesOnTheWay:
    """Codes of a step: `[batch, groups]`."""

    codes: torch.Tensor
    rows: Sequence[int] = ()
    """Rows of the batch that sampled."""


@dataclass(slots=True)
class PendingStep:
    """By row of the batch."""

    codes: CodesOnTheWay | None = None
    captured: dict[int, list[Captured | StepPayload]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.codes is not None or bool(self.captured)

    def join(self, output: ModelRunnerOutput) -> None:
        """Put everything on the output; the copies are complete."""
        by_row: list[Any] = [None] * len(output.req_ids)
        for row, found in self.captured.items():
            by_row[row] = [c.payload() if isinstance(c, Captured) else c for c in found]
        if self.codes is not None:
            codes = self.codes.codes.to(torch.int32).numpy()
            meta = {"kind": KIND_CODES, "groups": codes.shape[1]}
            for row in self.codes.rows:
                payload = StepPayload(meta, codes[row : row + 1])
                by_row[row] = [*(by_row[row] or ()), payload]
        output.pooler_output = by_row


class _Joined(AsyncModelRunnerOutput):
    """vLLM's asynchronous output with what belongs to it."""

    def __init__(self, inner: AsyncModelRunnerOutput, pending: PendingStep) -> None:
        self._inner = inner
        self._pending = pending
        self._copied = torch.Event()
        self._copied.record()

    def get_output(self) -> ModelRunnerOutput:
        output = self._inner.get_output()
        self._copied.synchronize()
        self._pending.join(output)
        return output


def with_payloads(output: Any, pending: PendingStep) -> Any:
    """The output of a step with its payloads; itself when there are none."""
    if not pending:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        return _Joined(output, pending)
    pending.join(output)
    return output
