"""Whether a replica that is alive still works: by what its heartbeats say. Plain state, no timer.

Two kinds of standing still: no heartbeat at all (stopped, or a thread that never lets go of the
interpreter), and heartbeats that show runnable work and no progress on it. Idle and parked work
is no runnable work.
"""

from __future__ import annotations

from vllm_omni.engine.stage_client import Heartbeat


class StallWatch:
    """Looks at one incarnation. `look` is called every few seconds."""

    def __init__(self, name: str, timeout_s: float, now_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._moved_s = now_s
        """When it was last seen without work, or further than before."""
        self._heard_s = now_s
        self._progress = -1.0
        self._is_suspect = False

    def look(self, beat: Heartbeat | None, now_s: float) -> str | None:
        """What is wrong, once it has been wrong for the whole timeout; None: nothing.

        A verdict needs two looks in a row: this process may itself have stood still, and then
        there are heartbeats it has not read yet.
        """
        complaint = self._complaint(beat, now_s)
        if complaint is None or not self._is_suspect:
            self._is_suspect = complaint is not None
            return None
        return complaint

    def _complaint(self, beat: Heartbeat | None, now_s: float) -> str | None:
        if beat is not None and beat.received_s > self._heard_s:
            self._heard_s = beat.received_s
            if not beat.num_runnable or beat.progress != self._progress:
                self._progress = beat.progress
                self._moved_s = beat.received_s
        if now_s - self._heard_s >= self._timeout_s:
            return f"stage {self._name} gave no sign of life for {now_s - self._heard_s:.0f} s"
        if self._heard_s - self._moved_s >= self._timeout_s:
            assert beat is not None
            return (
                f"stage {self._name} made no progress for {self._heard_s - self._moved_s:.0f} s "
                f"with {beat.num_runnable:.0f} runnable requests"
            )
        return None
