"""What the worker adds to a request's output of one step: rows it captured, codes it made.

Rides on vLLM's own output in the field for pooling results, which requests that write have no use
for, and is taken off before the output leaves the core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.engine import EngineCoreOutput


@dataclass(frozen=True, slots=True)
class StepPayload:
    """One frame for the streams of a request."""

    meta: Mapping[str, Any]
    """Of the frame; `kind` is one of those in `conditioning.py`."""
    data: npt.NDArray[Any]


def take_payloads(output: EngineCoreOutput) -> list[StepPayload]:
    """Take off what the worker added; real pooling results stay."""
    payloads: Any = output.pooling_output
    if not isinstance(payloads, list):
        return []
    output.pooling_output = None
    return payloads


def as_array(tensor: Any) -> tuple[npt.NDArray[Any], str]:
    """A CPU tensor's values and the name of their type; numpy has no bfloat16."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return np.ascontiguousarray(tensor.numpy()), name
