"""What the engine tells the metrics about, one method per event.

Called on the orchestrator's loop in the path of requests: an implementation must be cheap, must
not block and must not raise. `metrics/engine_metrics.py` implements it for Prometheus.
"""

from __future__ import annotations

from typing import Protocol


class EngineMetrics(Protocol):
    """Sink of the engine's events. Stages go by name, durations are seconds."""

    def request_submitted(self, stage: str) -> None:
        """A request was given to a replica of this stage."""

    def request_finished(self, stage: str, reason: str) -> None:
        """A submitted request left the stage: `finished`, `failed` or `aborted`."""

    def request_rejected(self, reason: str) -> None:
        """Admission refused a request: `overloaded` or `stopped`. Called on the API's loop."""

    def request_resubmitted(self, stage: str) -> None:
        """A request whose replica of this stage died is submitted again. On the API's loop."""

    def first_output(self, stage: str, seconds: float) -> None:
        """Time from the request's arrival to the stage's first output."""

    def first_audio(self, seconds: float) -> None:
        """Time from the request's arrival to its first samples."""

    def audio_written(self, stage: str, audio_s: float, wall_s: float) -> None:
        """A stage finished a request's audio: its length, and the time since its first input."""

    def audio_late(self, stage: str, seconds: float) -> None:
        """Samples were sent so long after all before had played. On the API's loop."""

    def replica_state(self, stage: str, replica: int, state: str) -> None:
        """A replica is now `starting`, `ready`, `draining`, `backoff` or `stopped`."""

    def replica_restarted(self, stage: str, replica: int) -> None:
        """A replica that had died serves again."""

    def replica_started(self, stage: str, replica: int, seconds: float) -> None:
        """A replica serves; its start took so long."""


class NullMetrics:
    """Counts nothing: for tests and for the offline library."""

    def request_submitted(self, stage: str) -> None:
        pass

    def request_finished(self, stage: str, reason: str) -> None:
        pass

    def request_rejected(self, reason: str) -> None:
        pass

    def request_resubmitted(self, stage: str) -> None:
        pass

    def first_output(self, stage: str, seconds: float) -> None:
        pass

    def first_audio(self, seconds: float) -> None:
        pass

    def audio_written(self, stage: str, audio_s: float, wall_s: float) -> None:
        pass

    def audio_late(self, stage: str, seconds: float) -> None:
        pass

    def replica_state(self, stage: str, replica: int, state: str) -> None:
        pass

    def replica_restarted(self, stage: str, replica: int) -> None:
        pass

    def replica_started(self, stage: str, replica: int, seconds: float) -> None:
        pass
