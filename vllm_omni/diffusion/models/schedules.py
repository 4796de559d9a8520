"""Noise schedules of requests: each has its own, over diffusers' scheduler classes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def fork(schedule: Any) -> Any:
    """A schedule that steps on without the other one noticing; they share tensors, none writes."""
    forked = copy.copy(schedule)
    for name, value in vars(forked).items():
        if isinstance(value, list):
            setattr(forked, name, list(value))
    return forked


def new_schedule(reference: Any, device: torch.device, **timesteps: Any) -> Any:
    """A noise schedule of one request. `timesteps` are arguments of diffusers' `set_timesteps`."""
    schedule = copy.deepcopy(reference.scheduler)
    schedule.set_timesteps(device=device, **timesteps)
    schedule.set_begin_index(0)
    return schedule


def linear_sigmas(num_steps: int) -> NDArray[np.float64]:
    """From 1 down to 1 / num_steps, before the schedule's own shift."""
    import numpy as np

    return np.linspace(1.0, 1 / num_steps, num_steps)


def shift_of(config: Mapping[str, Any], num_tokens: int, max_shift: float = 1.15) -> float:
    """How far the schedule is shifted for so many tokens: a line through two points."""
    few, many = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", max_shift)
    slope = (high - low) / (many - few)
    return num_tokens * slope + (low - slope * few)
