"""The two bounded queues between the API's event loop and the orchestrator's.

Both sides only ever put without waiting, so neither loop can block the other. What does not fit
is refused (new work), merged in one slot per request and stage (outputs), or kept in a set
(aborts): nothing is lost and nothing grows without bound.
"""

from __future__ import annotations

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
    """Orchestrator to API loop. `put` is called here, `take` there."""

    def __init__(self, maxsize: int) -> None:
        self._queue: janus.Queue[OutputBatch] = janus.Queue(maxsize)
        self._lock = threading.Lock()
        self._overflow: dict[tuple[str | None, int], ClientOutput | ErrorMessage] = {}

    def put(self, batch: OutputBatch) -> None:
        """Hand over a batch; merged into slots while the reader is behind."""
        with self._lock:
            if not self._overflow:
                try:
                    self._queue.sync_q.put_nowait(batch)
                except janus.SyncQueueFull:
                    pass  # the reader empties the queue and then looks at the overflow
                except janus.SyncQueueShutDown:
                    return
                else:
                    return
            self._merge(batch)

    def _merge(self, batch: OutputBatch) -> None:
        for item in batch:
            if isinstance(item, ErrorMessage):
                self._overflow[item.request_id, -1] = item
                continue
            key = (item.request_id, item.stage_id)
            older = self._overflow.get(key)
            assert older is None or isinstance(older, ClientOutput)
            self._overflow[key] = item if older is None else older.merged_with(item)

    async def take(self) -> Sequence[OutputBatch]:
        """Wait for batches; return all there are.

        Raises:
            EngineStoppedError: the orchestrator has ended and everything was read.
        """
        try:
            first = await self._queue.async_q.get()
        except janus.AsyncQueueShutDown:
            raise EngineStoppedError("the engine has stopped") from None
        return [first, *self._take_rest()]

    def _take_rest(self) -> list[OutputBatch]:
        """All that is there now: the queue's batches, and then what overflowed after them.

        Nobody puts meanwhile: a batch put between the last read and the overflow would come after
        what overflowed behind it.
        """
        batches: list[OutputBatch] = []
        with self._lock:
            while True:
                try:
                    batches.append(self._queue.async_q.get_nowait())
                except (janus.AsyncQueueEmpty, janus.AsyncQueueShutDown):
                    break
            if self._overflow:
                batches.append(list(self._overflow.values()))
                self._overflow = {}
        return batches

    def close(self) -> None:
        """No batch follows; what was put can still be taken."""
        self._queue.shutdown(immediate=False)
