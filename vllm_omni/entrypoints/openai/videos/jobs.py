"""The jobs that run: each takes one engine request to its files. On the server's loop.

A job ends in the table whatever happens to it: made, failed, cancelled, or ended by the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from vllm_omni.config.deploy import ServerLimits
from vllm_omni.entrypoints.openai.errors import describe
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.entrypoints.openai.videos.record import VideoRecord
from vllm_omni.entrypoints.openai.videos.store import INTERRUPTED, VideoStore
from vllm_omni.errors import EngineStoppedError, OverloadedError, RequestFailedError
from vllm_omni.outputs.media import Frames
from vllm_omni.outputs.request_output import OmniRequestOutput

logger = logging.getLogger(__name__)

CANCELLED: Final = "cancelled"
_CANCELLED_TEXT: Final = "the video was cancelled"
_POLL_S: Final = (0.2, 5.0)
"""Soonest and latest that a client is told to ask again."""
_STOPPED_TEXT: Final = "the server was stopped while this video was being made; create it again"


@dataclass(slots=True, eq=False)
class _Job:
    record: VideoRecord
    outputs: AsyncGenerator[OmniRequestOutput, None]
    progress: int = 0
    """Percent."""
    began_s: float = 0.0
    """When the engine took it up, on the loop's clock."""
    ends_as: tuple[str, str] = (INTERRUPTED, _STOPPED_TEXT)
    """Error code and message when its task is cancelled."""
    is_abandoned: bool = False
    """Nobody wants its files any more; read by the thread that writes them."""
    task: asyncio.Task[None] | None = None
    """Set before anybody else can see the job."""


class VideoJobs:
    """Made by `running`, which also ends them."""

    def __init__(
        self, store: VideoStore, pool: MediaPool, limits: ServerLimits, group: asyncio.TaskGroup
    ) -> None:
        self.store = store
        self._pool = pool
        self._max_jobs = limits.max_queued_videos
        self._group = group
        self._jobs: dict[str, _Job] = {}
        self._num_creating = 0
        # What the engine would refuse waits here: a job that was taken on is not told to go away.
        self._engine_places = asyncio.Semaphore(limits.max_in_flight)
        self._expiry_changed = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def running(
        cls, store: VideoStore, pool: MediaPool, limits: ServerLimits
    ) -> AsyncIterator[VideoJobs]:
        """Jobs over a store. Those that run at the end fail, and say why."""
        async with asyncio.TaskGroup() as group:
            jobs = cls(store, pool, limits, group)
            expiring = group.create_task(jobs._expire(), name="video-expiry")
            try:
                yield jobs
            finally:
                expiring.cancel()
                for job in jobs._jobs.values():
                    jobs._stop(job)

    def __repr__(self) -> str:
        return f"<VideoJobs {len(self._jobs)} of {self._max_jobs}>"

    def check_place(self) -> None:
        """Refuse a job more than the bound.

        Raises:
            OverloadedError: try again when one has ended.
        """
        num_jobs = len(self._jobs) + self._num_creating
        if num_jobs >= self._max_jobs:
            raise OverloadedError(
                f"{num_jobs} videos are queued or being made, the most that this server "
                "takes; try again"
            )

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Hold a job's place while its request is checked and its picture decoded.

        Raises:
            OverloadedError: there is none.
        """
        self.check_place()
        self._num_creating += 1
        try:
            yield
        finally:
            self._num_creating -= 1

    async def create(
        self, record: VideoRecord, outputs: AsyncGenerator[OmniRequestOutput, None]
    ) -> None:
        """Store a job and start it; the caller holds its place."""
        job = _Job(record, outputs)
        try:
            await self.store.create(record)
        except BaseException:
            # Nobody has heard of it: the client left meanwhile, or the disk is full.
            await asyncio.shield(self.store.delete(record.id))
            raise
        self._jobs[record.id] = job
        job.task = self._group.create_task(self._run(job), name=record.id)

    def progress(self, video_id: str) -> int:
        """Percent of a job that runs; 0 of any other."""
        job = self._jobs.get(video_id)
        return job.progress if job is not None else 0

    def poll_after_s(self, video_id: str) -> float:
        """When it is worth asking for a job again: about when it will be made, if that is soon."""
        job = self._jobs.get(video_id)
        soonest, latest = _POLL_S
        if job is None or not job.progress:
            return soonest
        passed_s = asyncio.get_running_loop().time() - job.began_s
        return min(max(passed_s * (100 - job.progress) / job.progress, soonest), latest)

    async def cancel(self, video_id: str) -> bool:
        """Stop a job: the engine hears of it within a step. False: it does not run."""
        job = self._jobs.get(video_id)
        if job is None or job.task is None:
            return False
        job.ends_as = (CANCELLED, _CANCELLED_TEXT)
        self._stop(job)
        await asyncio.wait([job.task])
        if self._jobs.pop(video_id, None) is not None:  # it had not begun to run
            await self.store.fail(video_id, *job.ends_as)
        return True

    async def delete(self, video_id: str) -> None:
        """Forget a job and its files; one that runs is stopped first."""
        await self.cancel(video_id)
        await self.store.delete(video_id)

    @staticmethod
    def _stop(job: _Job) -> None:
        job.is_abandoned = True
        if job.task is not None:
            job.task.cancel()

    async def _run(self, job: _Job) -> None:
        video_id = job.record.id
        try:
            frames = await self._make(job)
            await self._pool.run(self._write, job, frames)
            made = dataclasses.replace(
                job.record,
                size=f"{frames.width}x{frames.height}",
                seconds=job.record.seconds or f"{frames.duration_s:.2f}",
            )
            await self.store.complete(made)
        except asyncio.CancelledError:
            # A job that is over needs its end written more than it needs to stop at once.
            await asyncio.shield(self.store.fail(video_id, *job.ends_as))
            raise
        except EngineStoppedError:
            await self.store.fail(video_id, INTERRUPTED, _STOPPED_TEXT)
        except Exception as exc:
            # One job ends here, whatever the engine, a codec or the disk made of it.
            error = describe(exc)
            if error.status is HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.error("video %s failed", video_id, exc_info=exc)
            await self.store.fail(video_id, error.code, error.message)
        finally:
            del self._jobs[video_id]
            self._expiry_changed.set()

    async def _make(self, job: _Job) -> Frames:
        frames: Frames | None = None
        has_started = False
        async with self._engine_places, aclosing(job.outputs) as outputs:
            async for output in outputs:
                if not has_started:
                    has_started, job.began_s = True, asyncio.get_running_loop().time()
                    await self.store.start(job.record.id)
                if output.progress is not None:
                    done = output.progress
                    # The last percent is decoding and writing.
                    job.progress = min(99, 100 * done.step // max(done.num_steps, 1))
                frames = output.video or frames
        if frames is None:
            raise RequestFailedError("the model gave no video")
        return frames

    def _write(self, job: _Job, frames: Frames) -> None:
        """In the media pool, which cannot be interrupted."""
        self.store.files.write(job.record.id, frames)
        if job.is_abandoned:
            self.store.files.discard(job.record.id)

    async def _expire(self) -> None:
        """Delete videos when their time is over; asleep until the next one's is."""
        while True:
            self._expiry_changed.clear()
            delay_s = await self.store.expire()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._expiry_changed.wait()
