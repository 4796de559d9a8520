"""Faults that a request brings along, as its seed.

Every stage kind has a seed and hands it to the process that computes, so one number reaches all
of them over plain HTTP. Only the stages of `faulty_family` look for orders in it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

_FIRST_SEED: Final = 770_000_000
_VALUES: Final = 1_000_000


class Fault(enum.IntEnum):
    """What happens to the request; `value` is a step unless it says otherwise."""

    PACE = 0
    """Nothing: each step takes `value` milliseconds at least, as on a device that is busy."""
    RAISE = 1
    """This step and every later one of the request raises an exception."""
    MEMORY = 2
    """This step and every later one of the request raises an error of memory."""
    HANG = 3
    """The second step takes `value` milliseconds."""
    LOSE_CHUNK = 4
    """The chunk of this number is not sent to the next stage."""
    LOSE_END = 5
    """The end marker is not sent to the next stage."""
    CUT_SOCKETS = 6
    """At this step the connections to other replicas are shut down."""
    BREAK = 7
    """From this step on every step of the replica raises, whoever is in it."""
    CUT_ALL = 8
    """At this step every connection of the replica is shut down, that to its server too."""
    CROWDED = 9
    """A step of more than `value` requests has no memory."""
    DECODE = 10
    """A decode has no memory: `value` 0 unless it is in tiles, 1 never."""


@dataclass(frozen=True, slots=True)
class Order:
    fault: Fault
    value: int

    @property
    def seed(self) -> int:
        return _FIRST_SEED + self.fault * _VALUES + self.value


def order_in(seed: int | None) -> Order | None:
    """The order of a seed; None for a seed that is one."""
    if seed is None or not 0 <= seed - _FIRST_SEED < len(Fault) * _VALUES:
        return None
    fault, value = divmod(seed - _FIRST_SEED, _VALUES)
    return Order(Fault(fault), value)


def seed_for(fault: Fault, value: int = 0) -> int:
    return Order(fault, value).seed
