"""Realtime and duplex sessions: which request carries one, and where its stages run."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_omni.errors import BadRequestError


@dataclass(slots=True)
class DuplexSession:
    """One open session. It lives exactly as long as its request."""

    session_id: str
    request_id: str
    replica_by_stage: dict[int, int] = field(default_factory=dict)


class DuplexSessions:
    """All open sessions, by session and by request."""

    def __init__(self) -> None:
        self._by_session: dict[str, DuplexSession] = {}
        self._by_request: dict[str, DuplexSession] = {}

    def open(self, session_id: str, request_id: str) -> None:
        """Raises BadRequestError when that session is open already."""
        if session_id in self._by_session:
            raise BadRequestError(f"session {session_id!r} is open already", field="session_id")
        session = DuplexSession(session_id, request_id)
        self._by_session[session_id] = self._by_request[request_id] = session

    def record(self, request_id: str, stage_id: int, replica_id: int) -> None:
        """Note where a stage of a session runs; requests without session are ignored."""
        session = self._by_request.get(request_id)
        if session is not None:
            session.replica_by_stage[stage_id] = replica_id

    def get(self, session_id: str) -> DuplexSession | None:
        return self._by_session.get(session_id)

    def close_request(self, request_id: str) -> None:
        """The request is over, and its session with it."""
        session = self._by_request.pop(request_id, None)
        if session is not None:
            del self._by_session[session.session_id]

    def __len__(self) -> int:
        return len(self._by_session)
