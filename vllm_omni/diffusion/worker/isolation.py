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
_MAX_NARROW: Final = 64
"""Batch keys of which that is remembered."""


@dataclass(slots=True)
class _Narrow:
    width: int
    """Most members of a forward."""
    members: frozenset[str]
    """Who took the last step."""
    num_steps: int = NARROW_STEPS
    """For how many steps yet."""


class StepIsolation:
    """Takes denoise steps, and remembers which batches were too large for the memory.

    Each attempt without memory costs a forward, a collection of garbage and the device's caches:
    too much to pay in every step. What is tried follows from the steps alone, whatever else a rank
    does meanwhile, so all ranks of a replica try the same.
    """

    def __init__(self, denoise: Denoise) -> None:
        self._denoise = denoise
        self._narrow: dict[Hashable, _Narrow] = {}
        """By batch key."""

    def step(self, key: Hashable, states: Sequence[DenoiseState]) -> Failures:
        """Take one step of each, who may share a forward; the errors of those that could not."""
        width = self._width(key, states)
        failures: Failures = {}
        for first in range(0, len(states), width):
            failures |= self._step_apart(key, states[first : first + width])
        return failures

    def _width(self, key: Hashable, states: Sequence[DenoiseState]) -> int:
        narrow = self._narrow.get(key)
        if narrow is None:
            return len(states)
        members, last = _ids(states), narrow.members
        narrow.members = members
        narrow.num_steps -= 1
        if not narrow.num_steps or members.isdisjoint(last):
            del self._narrow[key]
        return len(states) if members.isdisjoint(last) else min(narrow.width, len(states))

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
            self._remember(key, _Narrow(width, _ids(states)))  # else it was one request's own need
        return failures

    def _remember(self, key: Hashable, narrow: _Narrow) -> None:
        self._narrow[key] = narrow
        if len(self._narrow) > _MAX_NARROW:
            del self._narrow[next(iter(self._narrow))]


def _ids(states: Sequence[DenoiseState]) -> frozenset[str]:
    return frozenset(state.request.request_id for state in states)


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
