"""Companions: second prompts of one request (guidance) that reach the next stage with it."""

from __future__ import annotations


class CfgCompanionTracker:
    """Which companions belong to which parent, in the order they came."""

    def __init__(self) -> None:
        self._companions: dict[str, list[str]] = {}

    def register(self, parent_id: str, companion_id: str) -> None:
        self._companions.setdefault(parent_id, []).append(companion_id)

    def companions_of(self, parent_id: str) -> list[str]:
        return list(self._companions.get(parent_id, ()))

    def cleanup_parent(self, parent_id: str) -> list[str]:
        """Forget a parent; returns its companions, which must be released with it."""
        return self._companions.pop(parent_id, [])

    def __len__(self) -> int:
        return len(self._companions)
