"""A replica's status as JSON: the same in `/health` and in the operators' routes."""

from __future__ import annotations

from vllm_omni.engine.replica_state import ReplicaStatus


def status_fields(status: ReplicaStatus) -> dict[str, object]:
    """All but the stage's name."""
    next_s = status.next_attempt_in_s
    return {
        "replica": status.replica,
        "state": status.state,
        "restarts": status.restarts,
        "last_error": status.last_error,
        "next_attempt_in_s": None if next_s is None else round(next_s, 3),
    }
