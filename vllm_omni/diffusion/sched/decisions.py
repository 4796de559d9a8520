"""Decisions of the diffusion scheduler: plain functions, no clock, lock or tensor.

A request waits, is prepared (encoded, given latents), takes its steps with others, is decoded.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


class Phase(enum.StrEnum):
    WAITING = enum.auto()
    """Nothing was done for it."""
    PREPARING = enum.auto()
    RUNNABLE = enum.auto()
    """It has latents and steps to take."""
    STEPPING = enum.auto()
    """It takes part in the step that runs now, or runs whole."""
    DENOISED = enum.auto()
    """All its steps are taken."""
    DECODING = enum.auto()


@dataclass(slots=True, eq=False)
class Item:
    """One request as the scheduler sees it."""

    request_id: str
    arrival: int
    """Counts the requests that came."""
    phase: Phase = Phase.WAITING
    key: Hashable = None
    """Requests with equal keys may share a forward."""
    step: int = 0
    """Steps taken."""
    num_steps: int = 0
    preview_interval: int | None = None
    preview_step: int = 0
    """The step of the latest preview."""


def next_batch(
    runnable: Iterable[Item], last_turn: Mapping[Hashable, int], max_batch_size: int
) -> list[Item]:
    """Who takes the next denoise step together.

    Groups of equal keys take turns, the one that waited longest first, so that no size or guidance
    starves another. In a group who came first goes first and stays in until it is done, so a new
    request joins where there is room and makes nobody leave.
    """
    groups: dict[Hashable, list[Item]] = {}
    for item in runnable:
        groups.setdefault(item.key, []).append(item)
    if not groups:
        return []
    oldest = {key: min(item.arrival for item in items) for key, items in groups.items()}
    key = min(groups, key=lambda key: (last_turn.get(key, -1), oldest[key]))
    return sorted(groups[key], key=_by_arrival)[:max_batch_size]


class MediaWork(enum.StrEnum):
    """What is done beside the denoise steps."""

    PREPARE = enum.auto()
    PREVIEW = enum.auto()
    DECODE = enum.auto()


@dataclass(frozen=True, slots=True)
class MediaState:
    """What a choice of the next work beside the denoise steps depends on."""

    next_waiting: Item | None
    """Who came first of those for whom nothing was done."""
    num_prepared: int
    """Requests that hold latents, those that wait to be decoded included."""
    num_steppable: int
    """Of those, the ones with steps to take."""
    denoised: Sequence[Item] = field(default=())
    preview: Item | None = None


def next_media_work(
    state: MediaState, max_batch_size: int, max_prepared: int
) -> tuple[MediaWork, Item] | None:
    """What to do next beside the denoise steps; None: nothing.

    While the batch has room a waiting request is prepared first: every step it joins earlier is
    one that need not be run for it alone later. Else who is denoised is decoded first: that ends
    a request and gives its memory back. Neither can hold the other up for long, since the room in
    a batch is bounded and so are the prepared requests.
    """
    waiting = state.next_waiting if state.num_prepared < max_prepared else None
    if waiting is not None and state.num_steppable < max_batch_size:
        return MediaWork.PREPARE, waiting
    if state.denoised:
        return MediaWork.DECODE, min(state.denoised, key=_by_arrival)
    if state.preview is not None:
        return MediaWork.PREVIEW, state.preview
    if waiting is not None:
        return MediaWork.PREPARE, waiting
    return None


def wants_preview(item: Item) -> bool:
    """A preview is due: its interval has passed, and steps are left that make it worth one."""
    return (
        item.preview_interval is not None
        and item.step < item.num_steps
        and item.step - item.preview_step >= item.preview_interval
    )


def _by_arrival(item: Item) -> int:
    return item.arrival
