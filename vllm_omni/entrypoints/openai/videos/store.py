"""Video jobs on disk, for the event loop: the table and the files, in a thread of their own."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from vllm_omni.config.deploy import ServerLimits
from vllm_omni.entrypoints.openai.videos.files import VideoFiles
from vllm_omni.entrypoints.openai.videos.record import VideoRecord
from vllm_omni.entrypoints.openai.videos.table import VideoTable
from vllm_omni.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

INTERRUPTED: Final = "server_stopped"
_INTERRUPTED_TEXT: Final = "the server ended while this video was being made; create it again"


class VideoStore:
    """Everything takes its turn in one thread, so the table and the files agree."""

    def __init__(
        self, folder: Path, limits: ServerLimits, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the folder; blocks. Jobs that a dead server left unfinished have failed.

        Raises:
            ConfigError: the folder cannot be used.
        """
        self._limits = limits
        self._clock = clock
        self.files = VideoFiles(folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="videos")
        try:
            self._table = self._thread.submit(VideoTable, self.files.table_path).result()
            self._thread.submit(self._recover).result()
        except (sqlite3.Error, OSError) as exc:
            self.files.close()
            self._thread.shutdown()
            raise ConfigError(f"'{self.files.table_path}' cannot be used: {exc}") from exc

    def close(self) -> None:
        """Close the table and give the folder back; blocks. Repeatable."""
        self._thread.submit(self._table.close).result()
        self._thread.shutdown()
        self.files.close()

    async def create(self, record: VideoRecord) -> None:
        def insert() -> None:
            self._table.insert(record)
            self._make_room()

        await self._run(insert)

    async def get(self, video_id: str) -> VideoRecord | None:
        return await self._run(self._table.get, video_id)

    async def page(
        self, after: str | None, limit: int, *, newest_first: bool
    ) -> list[VideoRecord] | None:
        """A page of jobs; None when there is no job `after`."""

        def read() -> list[VideoRecord] | None:
            if after is not None and self._table.get(after) is None:
                return None
            return self._table.page(after, limit, newest_first=newest_first)

        return await self._run(read)

    async def start(self, video_id: str) -> None:
        await self._run(self._table.start, video_id)

    async def complete(self, record: VideoRecord) -> None:
        """Its files were written: keep them, and make room for them."""

        def complete() -> None:
            now = int(self._clock())
            self._table.complete(
                dataclasses.replace(
                    record,
                    completed_at=now,
                    expires_at=self._expiry(now),
                    size_bytes=self.files.keep(record.id),
                )
            )
            self._make_room()

        await self._run(complete)

    async def fail(self, video_id: str, code: str, message: str) -> None:
        """A job ends with an error, unless it has ended already."""

        def fail() -> None:
            self._table.fail(video_id, code, message, self._expiry(self._clock()))
            self.files.discard(video_id)

        await self._run(fail)

    async def delete(self, video_id: str) -> None:
        await self._run(self._remove, [video_id])

    async def expire(self) -> float | None:
        """Delete what is over; seconds until the next one is, None when there is none."""

        def expire() -> float | None:
            self._remove(self._table.expired(self._clock()))
            following = self._table.next_expiry()
            return None if following is None else max(0.0, following - self._clock())

        return await self._run(expire)

    def _recover(self) -> None:
        self._table.fail(None, INTERRUPTED, _INTERRUPTED_TEXT, self._expiry(self._clock()))
        self._remove(self._table.expired(self._clock()))
        self._make_room()
        self.files.sweep(self._table.ids())

    def _expiry(self, now: float) -> int:
        return int(now + self._limits.video_expiry_s)

    def _make_room(self) -> None:
        limits = self._limits
        self._remove(self._table.surplus(limits.max_stored_videos, limits.max_stored_video_bytes))

    def _remove(self, video_ids: list[str]) -> None:
        self._table.delete(video_ids)
        for video_id in video_ids:
            self.files.remove(video_id)

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
