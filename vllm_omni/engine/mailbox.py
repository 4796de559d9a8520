"""The two bounded queues between the API's event loop and the orchestrator's.

Both sides only ever put without waiting, so neither loop can block the other. What does not fit
is refused (new work), merged in one slot per request and stage (outputs), or kept in a set
(aborts): nothing is lost and nothing grows without bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable

import janus

from vllm_omni.engine.queue_messages import ClientOutput, ErrorMessage, ToOrchestrator
from vllm_omni.errors import EngineStoppedError, OverloadedError

OutputBatch = list[ClientOutput | ErrorMessage]
"""What one iteration of the orchestrator's loop has for clients, in order."""
_Listener = tuple[asyncio.AbstractEventLoop, Callable[[], None]]


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
    """Orchestrator to API loop. `put` is called here, `take` there, by whom `listen` named.

    One lock and one callback: a chunk of audio crosses in one turn of the reader's loop. A janus
    queue takes three, since its reader is woken by a task that takes the queue's own asyncio locks.
    """

    def __init__(self, maxsize: int) -> None:
        self._maxsize = maxsize
        self._lock = threading.Lock()
        self._batches: list[OutputBatch] = []
        self._overflow: dict[tuple[str | None, int], ClientOutput | ErrorMessage] = {}
        self._listener: _Listener | None = None
        self._is_told = False
        """The listener was called and has not taken since."""
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
            told = self._to_tell()
        _call(told)

    def _merge(self, batch: OutputBatch) -> None:
        for item in batch:
            if isinstance(item, ErrorMessage):
                self._overflow[item.request_id, -1] = item
                continue
            key = (item.request_id, item.stage_id)
            older = self._overflow.get(key)
            assert older is None or isinstance(older, ClientOutput)
            self._overflow[key] = item if older is None else older.merged_with(item)

    def listen(self, on_outputs: Callable[[], None]) -> None:
        """Have this called on the running loop when there is something to take, or the end."""
        with self._lock:
            self._listener = asyncio.get_running_loop(), on_outputs
            self._is_told = False
            has_something = self._batches or self._overflow or self._is_closed
            told = self._to_tell() if has_something else None
        _call(told)

    def ignore(self) -> None:
        """Call nobody any more."""
        with self._lock:
            self._listener = None

    def take(self) -> list[OutputBatch]:
        """All there is, what overflowed last.

        Raises:
            EngineStoppedError: the orchestrator has ended and everything was read.
        """
        with self._lock:
            self._is_told = False
            batches, self._batches = self._batches, []
            if self._overflow:
                batches.append(list(self._overflow.values()))
                self._overflow = {}
            if self._is_closed and not batches:
                raise EngineStoppedError("the engine has stopped")
            told = self._to_tell() if self._is_closed else None
        _call(told)
        return batches

    def close(self) -> None:
        """No batch follows; what was put can still be taken."""
        with self._lock:
            self._is_closed = True
            told = self._to_tell()
        _call(told)

    def _to_tell(self) -> _Listener | None:
        if self._is_told:
            return None
        self._is_told = True
        return self._listener


def _call(listener: _Listener | None) -> None:
    if listener is not None:
        loop, on_outputs = listener
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody reads
            loop.call_soon_threadsafe(on_outputs)
