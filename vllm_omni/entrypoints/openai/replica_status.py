"""A replica's status as JSON: the same in `/health` and in the operators' routes."""

from __future__ import annotations

from vllm_omni.engine.replica_state import ReplicaStatus


def status_fields(status: ReplicaStatus) -> dict[str, object]:
    """All but the stage's name."""
    took_s, next_s = status.start_took_s, status.next_attempt_in_s
    return {
        "replica": status.replica,
        "state": status.state,
        "restarts": status.restarts,
        "last_error": status.last_error,
        "start_took_s": None if took_s is None else round(took_s, 3),
        "next_attempt_in_s": None if next_s is None else round(next_s, 3),
    }
