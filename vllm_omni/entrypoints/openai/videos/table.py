"""The SQLite table of video jobs. Blocks: `VideoStore` calls it in a thread of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Final

from vllm_omni.entrypoints.openai.videos.record import VideoRecord, VideoStatus

_SCHEMA_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS videos (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    created_at INTEGER NOT NULL,
    status TEXT NOT NULL,
    model TEXT NOT NULL,
    prompt TEXT NOT NULL,
    size TEXT NOT NULL,
    seconds TEXT NOT NULL,
    error_code TEXT,
    error_message TEXT,
    completed_at INTEGER,
    expires_at INTEGER,
    size_bytes INTEGER NOT NULL
)
"""
_COLUMNS: Final = tuple(column.name for column in fields(VideoRecord))
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)} FROM videos"
_OVER: Final = (VideoStatus.COMPLETED, VideoStatus.FAILED)


class VideoTable:
    """One connection, used by one thread."""

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            sqlite3.Error: it is no such table, or cannot be written.
        """
        self._db = sqlite3.connect(path, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _SCHEMA_VERSION):
                raise sqlite3.DatabaseError(f"it has version {version} of the table")
            self._db.execute(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def insert(self, record: VideoRecord) -> None:
        marks = ", ".join("?" * len(_COLUMNS))
        self._db.execute(
            f"INSERT INTO videos ({', '.join(_COLUMNS)}) VALUES ({marks})",
            tuple(asdict(record).values()),
        )

    def get(self, video_id: str) -> VideoRecord | None:
        row = self._db.execute(f"{_SELECT} WHERE id = ?", (video_id,)).fetchone()
        return _record(row) if row is not None else None

    def page(self, after: str | None, limit: int, *, newest_first: bool) -> list[VideoRecord]:
        """At most `limit` jobs in the order of their creation, those after `after`."""
        order, sign = ("DESC", "<") if newest_first else ("ASC", ">")
        where, values = "", list[object]()
        if after is not None:
            where = f" WHERE seq {sign} (SELECT seq FROM videos WHERE id = ?)"
            values = [after]
        rows = self._db.execute(f"{_SELECT}{where} ORDER BY seq {order} LIMIT ?", (*values, limit))
        return [_record(row) for row in rows]

    def start(self, video_id: str) -> None:
        """It is being made now."""
        self._db.execute(
            "UPDATE videos SET status = ? WHERE id = ? AND status = ?",
            (VideoStatus.IN_PROGRESS, video_id, VideoStatus.QUEUED),
        )

    def complete(self, record: VideoRecord) -> None:
        """It is made: what it turned out to be."""
        self._db.execute(
            "UPDATE videos SET status = ?, size = ?, seconds = ?, completed_at = ?, "
            "expires_at = ?, size_bytes = ? WHERE id = ?",
            (
                VideoStatus.COMPLETED,
                record.size,
                record.seconds,
                record.completed_at,
                record.expires_at,
                record.size_bytes,
                record.id,
            ),
        )

    def fail(self, video_id: str | None, code: str, message: str, expires_at: int) -> None:
        """One job, or all that have not ended, end with an error."""
        values = [VideoStatus.FAILED, code, message, expires_at, *_OVER]
        where = "status NOT IN (?, ?)"
        if video_id is not None:
            where += " AND id = ?"
            values.append(video_id)
        self._db.execute(
            "UPDATE videos SET status = ?, error_code = ?, error_message = ?, expires_at = ? "
            f"WHERE {where}",
            values,
        )

    def delete(self, video_ids: Sequence[str]) -> None:
        self._db.executemany("DELETE FROM videos WHERE id = ?", [(one,) for one in video_ids])

    def ids(self) -> set[str]:
        return {row[0] for row in self._db.execute("SELECT id FROM videos")}

    def expired(self, now: float) -> list[str]:
        """Jobs whose time is over."""
        rows = self._db.execute("SELECT id FROM videos WHERE expires_at <= ?", (now,))
        return [row[0] for row in rows]

    def next_expiry(self) -> int | None:
        """When the next job's time is over."""
        found: int | None = self._db.execute("SELECT MIN(expires_at) FROM videos").fetchone()[0]
        return found

    def surplus(self, max_count: int, max_bytes: int) -> list[str]:
        """The oldest jobs that have ended, as many as the bounds are passed by."""
        count, size_bytes = self._db.execute(
            "SELECT COUNT(*), COALESCE(SUM(size_bytes), 0) FROM videos"
        ).fetchone()
        surplus: list[str] = []
        rows = self._db.execute(
            "SELECT id, size_bytes FROM videos WHERE status IN (?, ?) ORDER BY seq", _OVER
        )
        for video_id, own_bytes in rows:
            # A failed job has no bytes to give.
            if count <= max_count and (size_bytes <= max_bytes or not own_bytes):
                continue
            surplus.append(video_id)
            count, size_bytes = count - 1, size_bytes - own_bytes
        return surplus


def _record(row: Sequence[object]) -> VideoRecord:
    values = dict(zip(_COLUMNS, row, strict=True))
    return VideoRecord(**{**values, "status": VideoStatus(str(values["status"]))})  # type: ignore[arg-type]
