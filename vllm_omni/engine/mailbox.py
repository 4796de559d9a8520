"""The two bounded queues between the API's event loop and the orchestrator's.

Both sides only ever put without waiting, so neither loop can block the other. What does not fit
is refused (new work), merged in one slot per request and stage (outputs), or kept in a set
(aborts): nothing is lost and nothing grows without bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Sequence

import janus

from vllm_omni.engine.queue_messages import ClientOutput, ErrorMessage, ToOrchestrator
from vllm_omni.errors import EngineStoppedError, OverloadedError

OutputBatch = list[ClientOutput | ErrorMessage]
"""What one iteration of the orchestrator's loop has for clients, in order."""


class Inbox:
    """API loop to orchestrator. `put` and `abort` are called there, `take` here."""

    def __init__(self, maxsize: int) -> None:
        self._queue: janus.Queue[ToOrchestrator | None] = janus.Queue(maxsize)
        self._lock = threading.Lock()
        self._aborts: set[str] = set()

    def put(self, message: ToOrchestrator) -> None:
        """Hand over new work.

        Raises:
            OverloadedError: the orchestrator is that far behind.
            EngineStoppedError: it has stopped.
        """
        try:
            self._queue.sync_q.put_nowait(message)
        except janus.SyncQueueFull:
            raise OverloadedError("the orchestrator is behind; its queue is full") from None
        except janus.SyncQueueShutDown:
            raise EngineStoppedError("the engine has stopped") from None

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ask for requests to be stopped; always accepted, also when the queue is full."""
        with self._lock:
            is_first = not self._aborts
            self._aborts.update(request_ids)
        if is_first:
            self.wake()

    def wake(self) -> None:
        """Let `take` return. A full or closed queue needs no waking."""
        try:
            self._queue.sync_q.put_nowait(None)
        except (janus.SyncQueueFull, janus.SyncQueueShutDown):
            return

    async def take(self) -> tuple[list[ToOrchestrator], set[str]]:
        """Wait for messages; return all there are, and the ids to abort after handling them.

        Aborts are taken first: the request each one stops is among the messages or older.
        """
        messages = [await self._queue.async_q.get()]
        with self._lock:
            aborts, self._aborts = self._aborts, set()
        while True:
            try:
                messages.append(self._queue.async_q.get_nowait())
            except (janus.AsyncQueueEmpty, janus.AsyncQueueShutDown):
                return [message for message in messages if message is not None], aborts

    def close(self) -> None:
        """Refuse further messages and wake whoever waits."""
        self._queue.shutdown(immediate=True)


class Outbox:
    """Orchestrator to API loop. `put` is called here, `take` there.

    One lock and one callback: a chunk of audio crosses in half the time that a janus queue needs,
    whose reader is woken by a task that takes the queue's own asyncio locks.
    """

    def __init__(self, maxsize: int) -> None:
        self._maxsize = maxsize
        self._lock = threading.Lock()
        self._batches: list[OutputBatch] = []
        self._overflow: dict[tuple[str | None, int], ClientOutput | ErrorMessage] = {}
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        """The reader, while there is nothing for it."""
        self._is_closed = False

    def put(self, batch: OutputBatch) -> None:
        """Hand over a batch; merged into slots while the reader is behind."""
        with self._lock:
            if self._is_closed:
                return
            if len(self._batches) < self._maxsize and not self._overflow:
                self._batches.append(batch)
            else:
                self._merge(batch)
            self._wake()

    def _merge(self, batch: OutputBatch) -> None:
        for item in batch:
            if isinstance(item, ErrorMessage):
                self._overflow[item.request_id, -1] = item
                continue
            key = (item.request_id, item.stage_id)
            older = self._overflow.get(key)
            assert older is None or isinstance(older, ClientOutput)
            self._overflow[key] = item if older is None else older.merged_with(item)

    def _wake(self) -> None:
        if self._waiting is None:
            return
        loop, waiter = self._waiting
        self._waiting = None
        with contextlib.suppress(RuntimeError):  # the reader's loop is closed: nobody reads
            loop.call_soon_threadsafe(_resolve, waiter)

    async def take(self) -> Sequence[OutputBatch]:
        """Wait for batches; return all there are, what overflowed last.

        Raises:
            EngineStoppedError: the orchestrator has ended and everything was read.
        """
        while True:
            with self._lock:
                if self._batches or self._overflow:
                    return self._take_all()
                if self._is_closed:
                    raise EngineStoppedError("the engine has stopped")
                loop = asyncio.get_running_loop()
                waiter = loop.create_future()
                self._waiting = loop, waiter
            await waiter

    def _take_all(self) -> list[OutputBatch]:
        batches, self._batches = self._batches, []
        if self._overflow:
            batches.append(list(self._overflow.values()))
            self._overflow = {}
        return batches

    def close(self) -> None:
        """No batch follows; what was put can still be taken."""
        with self._lock:
            self._is_closed = True
            self._wake()


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():  # else its reader was cancelled
        waiter.set_result(None)
