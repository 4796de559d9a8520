"""Faults that are the same in every stage that computes in Python."""

from __future__ import annotations

from tests.dfx.reliability.cut_sockets import cut_sockets
from tests.dfx.reliability.orders import Fault


def commit(fault: Fault) -> None:
    """What a step does that was ordered to fail so."""
    match fault:
        case Fault.RAISE:
            raise RuntimeError("ordered by the test")
        case Fault.MEMORY:
            raise MemoryError("ordered by the test")
        case Fault.CUT_SOCKETS:
            cut_sockets()
        case Fault.CUT_ALL:
            cut_sockets(only_data=False)
