"""The error of a dead replica, as vLLM's own front end knows it."""

from __future__ import annotations

from vllm.v1.engine.exceptions import EngineDeadError


class ReplicaDeadError(EngineDeadError):
    """The replica's process died or its engine failed; says which and how."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message
