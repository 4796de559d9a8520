"""One denoise step whose failures stay with the requests that cause them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_omni.diffusion.models.interface import DenoiseState
from vllm_omni.generation.memory_errors import free_memory, halves, is_out_of_memory

logger = logging.getLogger(__name__)

Denoise = Callable[[Sequence[DenoiseState]], None]
Failures = dict[str, Exception]


NARROW_STEPS: Final = 50
"""For so many steps batches that had no memory run in parts; then they are tried whole again."""


@dataclass(slots=True)
class _Narrow:
    width: int
    """Most members of a forward."""
    num_steps: int = NARROW_STEPS
    """For how many steps yet."""


class StepIsolation:
    """Takes denoise steps, and remembers which batches were too large for the memory.

    Each attempt without memory costs a forward, a collection of garbage and the device's caches:
    too much to pay in every step.
    """

    def __init__(self, denoise: Denoise) -> None:
        self._denoise = denoise
        self._narrow: dict[Hashable, _Narrow] = {}
        """By batch key."""

    def step(self, key: Hashable, states: Sequence[DenoiseState]) -> Failures:
        """Take one step of each, who may share a forward; the errors of those that could not."""
        width = self._width(key, len(states))
        failures: Failures = {}
        for first in range(0, len(states), width):
            failures |= self._step_apart(key, states[first : first + width])
        return failures

    def forget(self) -> None:
        """Try everything whole again."""
        self._narrow.clear()

    def _width(self, key: Hashable, num_states: int) -> int:
        narrow = self._narrow.get(key)
        if narrow is None:
            return num_states
        narrow.num_steps -= 1
        if not narrow.num_steps:
            self._narrow.pop(key, None)  # the other lane may have had it forgotten meanwhile
        return min(narrow.width, num_states)

    def _step_apart(self, key: Hashable, states: Sequence[DenoiseState]) -> Failures:
        """A batch that fails as a whole runs one by one.

        One that finds no memory runs again, half as many at a time and in the end each alone,
        after memory was given back; who finds none even then has its error.
        """
        failures, width = _step(self._denoise, states), len(states)
        for size in halves(len(states)):
            starved = [s for s in states if is_starved(failures.get(s.request.request_id))]
            if not starved:
                break
            for state in starved:
                del failures[state.request.request_id]
            logger.warning(
                "no memory for a denoise step of %d, trying %d at a time", len(starved), size
            )
            free_memory()
            for first in range(0, len(starved), size):
                failures |= _step(self._denoise, starved[first : first + size])
            width = size
        if width < len(states) and not any(map(is_starved, failures.values())):
            self._narrow[key] = _Narrow(width)  # else it was one request's own need
        return failures


def _step(denoise: Denoise, states: Sequence[DenoiseState]) -> Failures:
    before = [state.step_index for state in states]
    try:
        denoise(states)
    except Exception as error:  # noqa: BLE001 - the boundary of a batch
        failed = without_frames(error)
    else:
        return _not_one_step(states, before)
    left = [state for state, step in zip(states, before, strict=True) if state.step_index == step]
    if len(left) == 1 or is_out_of_memory(failed):
        return {state.request.request_id: failed for state in left}
    logger.warning("a denoise step of %d failed, running one by one: %r", len(left), failed)
    failures: Failures = {}
    for state in left:
        failures |= _step(denoise, [state])
    return failures


def _not_one_step(states: Sequence[DenoiseState], before: Sequence[int]) -> Failures:
    """A state that stays where it is would keep its request in the batch for ever."""
    return {
        state.request.request_id: RuntimeError(
            f"the pipeline took {state.step_index - step} steps instead of 1"
        )
        for state, step in zip(states, before, strict=True)
        if state.step_index != step + 1
    }


def is_starved(error: BaseException | None) -> bool:
    """Whether it failed for lack of memory."""
    return error is not None and is_out_of_memory(error)


def without_frames(error: Exception) -> Exception:
    """An error of lacking memory without its traceback, which holds on to what was allocated."""
    if not is_out_of_memory(error):
        return error
    error.__context__ = None
    return error.with_traceback(None)
