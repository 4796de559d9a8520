"""One video job, as it is stored and as clients see it."""

from __future__ import annotations

import enum
import re
import secrets
from dataclasses import dataclass
from typing import Any, Final

_ID: Final = re.compile(r"video_[0-9a-f]{32}")


class VideoStatus(enum.StrEnum):
    """OpenAI's four; a cancelled job is a failed one whose error says so."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self in (VideoStatus.COMPLETED, VideoStatus.FAILED)


def new_video_id() -> str:
    """Unguessable: whoever has the server's key and the id may read the video."""
    return f"video_{secrets.token_hex(16)}"


def is_video_id(text: str) -> bool:
    """Whether a client's text could be one of our ids. Only such a text names a file."""
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRecord:
    """A row of the table. Times are Unix seconds."""

    id: str
    created_at: int
    status: VideoStatus
    model: str
    prompt: str
    size: str
    seconds: str
    error_code: str | None = None
    error_message: str | None = None
    completed_at: int | None = None
    expires_at: int | None = None
    size_bytes: int = 0
    """Of its files."""

    def body(self, progress: int = 0) -> dict[str, Any]:
        """OpenAI's video object. `progress` is that of a job that runs, in percent."""
        error = None
        if self.error_code is not None:
            error = {"code": self.error_code, "message": self.error_message}
        return {
            "id": self.id,
            "object": "video",
            "created_at": self.created_at,
            "completed_at": self.completed_at,
            "expires_at": self.expires_at,
            "status": self.status,
            "progress": 100 if self.status is VideoStatus.COMPLETED else progress,
            "model": self.model,
            "prompt": self.prompt,
            "seconds": self.seconds,
            "size": self.size,
            "error": error,
            "remixed_from_video_id": None,
        }
