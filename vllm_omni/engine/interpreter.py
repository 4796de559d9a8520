"""How the threads of a process of ours take turns at Python's interpreter."""

from __future__ import annotations

import sys
from typing import Final

SWITCH_INTERVAL_S: Final = 0.0005
"""After so long a thread that waits for the interpreter gets it. Python's own 5 ms pass each time
that a thread comes back from a socket while another prepares a step or renders a prompt, and
reading one message is several times: beside a loop of pure Python eight messages of two parts took
66 ms so, and take 1; beside operations that let go of the interpreter it makes no difference."""


def take_short_turns() -> None:
    """For this whole process. Not for one that only uses us as a library."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
