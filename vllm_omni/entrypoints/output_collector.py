"""Outputs on the API's loop: from the orchestrator's batches to the generator that waits.

A collector holds one slot per choice and stage: a slow client merges, it never grows a queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from vllm_omni.engine.mailbox import Outbox
from vllm_omni.engine.queue_messages import ClientOutput, ErrorMessage
from vllm_omni.errors import (
    EngineStoppedError,
    OmniError,
    ReplicaDiedError,
    StageUnavailableError,
)

logger = logging.getLogger(__name__)


class OutputCollector:
    """What one client request waits for: the outputs of its `num_choices` sub-requests."""

    __slots__ = ("_error", "_slots", "_taken", "_waiter", "lost", "num_open")

    def __init__(self, num_choices: int) -> None:
        self.num_open = num_choices
        """Choices whose last output was not taken yet."""
        self.lost: dict[int, ErrorMessage] = {}
        """Choices whose replica died before any content of theirs was taken."""
        self._slots: dict[tuple[int, int], ClientOutput] = {}
        self._taken: set[int] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._error: OmniError | None = None

    def put(self, index: int, message: ClientOutput) -> None:
        """Add an output; merged with one of the same stage that was not taken yet."""
        key = (index, message.stage_id)
        slots = self._slots
        if key in slots:
            # The last output must be taken last: it closes its choice.
            older = slots.pop(key) if message.timings is not None else slots[key]
            slots[key] = older.merged_with(message)
        else:
            slots[key] = message
        self._wake()

    def fail(self, error: OmniError) -> None:
        """End the wait; what was not taken is dropped."""
        self._error = error
        self._wake()

    def lose(self, index: int, death: ErrorMessage) -> None:
        """A choice's replica died: it may start anew, unless something of it was taken."""
        if index in self._taken:
            self.fail(death.to_error())
            return
        self._slots = {key: kept for key, kept in self._slots.items() if key[0] != index}
        self.lost[index] = death
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def take(self) -> tuple[int, ClientOutput] | None:
        """The next choice index and output; None when there is none yet."""
        if self._error is not None:
            raise self._error
        if not self._slots:
            return None
        key = next(iter(self._slots))
        message = self._slots.pop(key)
        if message.output.has_content:
            self._taken.add(key[0])
        if message.timings is not None:
            self.num_open -= 1
        return key[0], message

    async def wait(self) -> None:
        """Return when `take` has something to say."""
        if self._slots or self.lost or self._error is not None:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class OutputRouter:
    """Reads the outbox on one event loop and hands every item to the request it is for."""

    def __init__(self, outbox: Outbox, stages: Sequence[str] = ()) -> None:
        """`stages` are their names by stage id."""
        self._outbox = outbox
        self._stages = stages
        self._routes: dict[str, tuple[OutputCollector, int]] = {}
        self._is_started = False
        self.dead_error: EngineStoppedError | None = None
        """Set once: the engine as a whole is dead, and this is why."""

    def __len__(self) -> int:
        return len(self._routes)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._routes

    def start(self) -> None:
        """Begin to read, on the running loop. Repeatable."""
        if not self._is_started:
            self._is_started = True
            self._outbox.listen(self._read)

    def open(self, request_ids: Sequence[str], collector: OutputCollector) -> None:
        """Outputs of these internal ids go to this collector, as choices 0, 1, ..."""
        for index, request_id in enumerate(request_ids):
            self.open_choice(request_id, collector, index)

    def open_choice(self, request_id: str, collector: OutputCollector, index: int) -> None:
        """Outputs of this internal id go to this collector, as this choice."""
        if self.dead_error is not None:
            raise self.dead_error
        self._routes[request_id] = (collector, index)

    def close(self, request_ids: Sequence[str]) -> list[str]:
        """Stop routing; returns the ids whose last output had not arrived."""
        return [i for i in request_ids if self._routes.pop(i, None) is not None]

    def fail(self, request_ids: Sequence[str], error: OmniError) -> None:
        """End requests from this side."""
        for request_id in request_ids:
            route = self._routes.pop(request_id, None)
            if route is not None:
                route[0].fail(error)

    async def stop(self) -> None:
        """Stop reading; whoever still waits is failed."""
        self._outbox.ignore()
        self._fail_all(EngineStoppedError("the engine has stopped"))

    def _read(self) -> None:
        try:
            batches = self._outbox.take()
        except EngineStoppedError as error:
            self._fail_all(error)
            return
        for item in (item for batch in batches for item in batch):
            if isinstance(item, ClientOutput):
                self._deliver(item)
            else:
                self._deliver_error(item)

    def _deliver(self, message: ClientOutput) -> None:
        if message.timings is None:
            route = self._routes.get(message.request_id)
        else:
            route = self._routes.pop(message.request_id, None)
        if route is not None:
            route[0].put(route[1], message)

    def _deliver_error(self, message: ErrorMessage) -> None:
        if message.request_id is not None:
            route = self._routes.pop(message.request_id, None)
            if route is None:
                logger.warning("request=%s is gone: %s", message.request_id, message.error)
            elif message.code == ReplicaDiedError.code:
                route[0].lose(route[1], message)
            else:
                route[0].fail(self._to_error(message))
        elif message.fatal:
            self._fail_all(EngineStoppedError(message.error))

    def _to_error(self, message: ErrorMessage) -> OmniError:
        error, stage_id = message.to_error(), message.stage_id
        if isinstance(error, StageUnavailableError) and stage_id is not None:
            error.stage = self._stages[stage_id] if stage_id < len(self._stages) else None
        return error

    def _fail_all(self, error: EngineStoppedError) -> None:
        if self.dead_error is None:
            self.dead_error = error
        routes, self._routes = self._routes, {}
        for collector, _ in routes.values():
            collector.fail(error)
