"""The replicas of one stage: slots, who is bound to which, selection, eviction.

Runs on the orchestrator's loop. `clients` and the counting properties may also be read from the
API's loop (health). A slot keeps its id for ever; a dead replica leaves a hole that
`attach_replica` fills again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar

from vllm_omni.config.pipeline import StageKind
from vllm_omni.engine.messages import StageRequest
from vllm_omni.engine.stage_client import StageClient
from vllm_omni.errors import StageUnavailableError

logger = logging.getLogger(__name__)


class StagePool:
    """Replicas of one stage. Kind and name are the stage's own and outlive every replica."""

    DISPATCH_WAIT_TIMEOUT_S: ClassVar[float] = 10.0
    """How long a waiting selection waits for a replica to come up."""
    DISPATCH_RETRY_INTERVAL_S: ClassVar[float] = 0.5
    """Upper bound between two looks of a waiting selection that nobody woke."""
    SHUTDOWN_TIMEOUT_S: ClassVar[float] = 10.0

    def __init__(
        self,
        stage_id: int,
        name: str,
        stage_type: StageKind,
        clients: Sequence[StageClient | None],
        *,
        distributed: bool = False,
    ) -> None:
        """`distributed`: replicas join by themselves, so a submit waits for one to come up."""
        self.stage_id = stage_id
        self.name = name
        self.stage_type = stage_type
        self.clients: list[StageClient | None] = list(clients)
        self._distributed = distributed
        self._bindings: dict[str, int] = {}
        self._working: dict[str, int] = {}
        """Bindings whose replica has not finished the request."""
        self._load: Counter[int] = Counter()
        """How many of those each replica has."""
        self._unavailable: set[int] = set()
        self._cursor = 0
        self._came_up = asyncio.Event()
        self._closing: dict[int, asyncio.Task[None]] = {}
        """Evicted clients that are being shut down, by slot."""
        self._drained: dict[int, asyncio.Event] = {}
        """Who waits for a replica to have no request any more."""

    def __repr__(self) -> str:
        slots = ", ".join(
            f"{replica_id} {self._slot_state(replica_id)}"
            for replica_id in range(len(self.clients))
        )
        return f"<StagePool {self.name} [{slots}] bound={len(self._bindings)}>"

    def _slot_state(self, replica_id: int) -> str:
        if self.clients[replica_id] is None:
            return "dead"
        return "unavailable" if replica_id in self._unavailable else "live"

    @property
    def num_replicas(self) -> int:
        """Slots, holes included."""
        return len(self.clients)

    @property
    def live_num_replicas(self) -> int:
        return len(self.clients) - self.clients.count(None)

    @property
    def stage_client(self) -> StageClient | None:
        """The first live replica's client."""
        return next((client for client in self.clients if client is not None), None)

    def live_replica_ids(self) -> list[int]:
        return [i for i, client in enumerate(self.clients) if client is not None]

    def available_replica_ids(self) -> list[int]:
        """Replicas that new requests may go to."""
        return [i for i in self.live_replica_ids() if i not in self._unavailable]

    def is_replica_available(self, replica_id: int) -> bool:
        return (
            0 <= replica_id < len(self.clients)
            and self.clients[replica_id] is not None
            and replica_id not in self._unavailable
        )

    def mark_replica_unavailable(self, replica_id: int) -> None:
        """No new requests for this replica; what it has goes on."""
        self._unavailable.add(replica_id)

    def mark_replica_available(self, replica_id: int) -> None:
        self._unavailable.discard(replica_id)
        self._came_up.set()

    def attach_replica(self, replica_id: int, client: StageClient) -> None:
        """Fill an empty slot with a replica that is ready."""
        if self.clients[replica_id] is not None:
            raise ValueError(f"stage {self.stage_id} replica {replica_id} is already attached")
        self.clients[replica_id] = client
        self.mark_replica_available(replica_id)

    def get_bound_replica_id(self, request_id: str) -> int | None:
        """The replica that has this request, also when it has died since."""
        return self._bindings.get(request_id)

    def select_replica_id(
        self, request_id: str | None = None, *, affinity_request_id: str | None = None
    ) -> int:
        """The replica for a request: its own while that lives, else the one with least to do.

        With `affinity_request_id` the replica of that request is preferred. A request id is
        bound to the result.

        Raises:
            StageUnavailableError: no replica is live and available.
        """
        for known in (request_id, affinity_request_id):
            if known is None:
                continue
            bound = self._bindings.get(known)
            if bound is not None and self.clients[bound] is not None:
                break
        else:
            bound = self._least_busy()
        if request_id is not None:
            self._bindings[request_id] = bound
            self._note_working(request_id, bound)
        return bound

    def _least_busy(self) -> int:
        """The replica with the fewest unfinished requests; among equals the next in turn."""
        num_slots = len(self.clients)
        in_turn = [(self._cursor + step) % num_slots for step in range(num_slots)]
        available = [i for i in in_turn if self.is_replica_available(i)]
        if not available:
            raise StageUnavailableError(f"stage {self.stage_id} has no live replicas")
        replica_id = min(available, key=self._load.__getitem__)
        self._cursor = (replica_id + 1) % num_slots
        return replica_id

    def _note_working(self, request_id: str, replica_id: int) -> None:
        self.note_finished(request_id)
        self._working[request_id] = replica_id
        self._load[replica_id] += 1

    def note_finished(self, request_id: str) -> None:
        """The replica has done its part of a request, which stays bound to it until released."""
        replica_id = self._working.pop(request_id, None)
        if replica_id is not None:
            self._load[replica_id] -= 1

    def preselect_replica_id(
        self, request_id: str, *, affinity_request_id: str | None = None
    ) -> int:
        """Choose and bind now what a later submit will use."""
        return self.select_replica_id(request_id, affinity_request_id=affinity_request_id)

    async def wait_for_replica_id(self, request_id: str | None = None) -> int:
        """Select, and wait for a replica that is about to come up.

        Raises:
            StageUnavailableError: none came up within `DISPATCH_WAIT_TIMEOUT_S`.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self.DISPATCH_WAIT_TIMEOUT_S
        while True:
            self._came_up.clear()
            try:
                return self.select_replica_id(request_id)
            except StageUnavailableError:
                wait_s = min(self.DISPATCH_RETRY_INTERVAL_S, end_s - loop.time())
            if wait_s <= 0:
                raise StageUnavailableError(
                    f"no UP replica for stage {self.stage_id} after "
                    f"{self.DISPATCH_WAIT_TIMEOUT_S:.1f}s"
                )
            try:
                await asyncio.wait_for(self._came_up.wait(), wait_s)
            except TimeoutError:
                continue

    def release(self, request_id: str) -> None:
        """Forget a request's binding; unknown ids are ignored."""
        bound = self._bindings.pop(request_id, None)
        self.note_finished(request_id)
        if self._drained and bound in self._drained and not self.num_bound(bound):
            self._drained[bound].set()

    def num_bound(self, replica_id: int) -> int:
        """Requests that have this replica, or will come to it."""
        return sum(bound == replica_id for bound in self._bindings.values())

    async def wait_drained(self, replica_id: int, timeout_s: float | None) -> bool:
        """Wait until no request has this replica; False when that took too long.

        Without a timeout it ends with the deadline of the last request.
        """
        if not self.num_bound(replica_id):
            return True
        drained = self._drained[replica_id] = asyncio.Event()
        try:
            async with asyncio.timeout(timeout_s):
                await drained.wait()
        except TimeoutError:
            return False
        finally:
            del self._drained[replica_id]
        return True

    def client(self, replica_id: int) -> StageClient:
        """The client in a slot.

        Raises:
            StageUnavailableError: the slot is empty.
        """
        client = self.clients[replica_id]
        if client is None:
            raise StageUnavailableError(
                f"stage {self.stage_id} replica {replica_id} is not attached"
            )
        return client

    async def submit_initial(
        self, request: StageRequest, *, affinity_request_id: str | None = None
    ) -> int:
        """Give a request to its replica; returns which.

        Raises:
            StageUnavailableError: no replica takes it.
            EngineDeadError: the replica died; the request stays bound to it.
            BadRequestError: the replica cannot serve it.
        """
        if self._distributed and not self.available_replica_ids():
            await self.wait_for_replica_id(request.request_id)
        replica_id = self.select_replica_id(
            request.request_id, affinity_request_id=affinity_request_id
        )
        await self.client(replica_id).add_request_async(request)
        return replica_id

    async def submit_update(self, request: StageRequest) -> int:
        """Give more input of a running session to the replica that has it; returns which.

        Raises:
            StageUnavailableError: no replica has it, or the one that had it is gone.
            EngineDeadError: the replica died.
        """
        replica_id = self._bindings.get(request.request_id)
        if replica_id is None:
            raise StageUnavailableError(
                f"stage {self.stage_id} has no replica bound to request {request.request_id}"
            )
        self._note_working(request.request_id, replica_id)
        await self.client(replica_id).update_request_async(request)
        return replica_id

    async def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Stop requests on the replicas they are bound to; dead replicas are passed over."""
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
            replica_id = self._bindings.get(request_id)
            if replica_id is not None:
                by_replica.setdefault(replica_id, []).append(request_id)
        for replica_id, ids in by_replica.items():
            client = self.clients[replica_id]
            if client is not None:
                await client.abort_requests_async(ids)

    def evict_replica(self, replica_id: int, grace_s: float = 0.0) -> None:
        """Empty a slot at once; its client is shut down beside the running work.

        A replica that is not dead may get `grace_s` to end by itself. Bindings to it stay until
        their requests are released, so that they can be found.
        """
        if not 0 <= replica_id < len(self.clients):
            raise ValueError(
                f"evict_replica: replica_id {replica_id} out of range "
                f"(num_replicas={len(self.clients)})"
            )
        client = self.clients[replica_id]
        if client is None:
            return
        self.clients[replica_id] = None
        if replica_id in self._drained:
            self._drained[replica_id].set()
        self._closing[replica_id] = asyncio.get_running_loop().create_task(
            self._shutdown_client(client, grace_s), name=f"evict {self.name}/{replica_id}"
        )

    async def wait_closed(self, replica_id: int) -> None:
        """Wait until an evicted replica is gone and has given its device back."""
        closing = self._closing.get(replica_id)
        if closing is not None:
            await asyncio.wait([closing])

    async def shutdown_replica(self, replica_id: int) -> None:
        """Shut a replica's client down; failures are logged. The slot keeps it."""
        client = self.clients[replica_id]
        if client is not None:
            await self._shutdown_client(client, self.SHUTDOWN_TIMEOUT_S)

    async def _shutdown_client(self, client: StageClient, timeout_s: float) -> None:
        try:
            await client.shutdown_async(timeout_s)
        except Exception:
            # One client's failure must not keep the others running.
            logger.exception(
                "stage=%s replica=%d could not be shut down", self.name, client.replica_id
            )

    async def close(self, timeout_s: float) -> None:
        """Shut every replica down, all at once, and wait for those that were evicted before."""
        async with asyncio.TaskGroup() as group:
            for replica_id, client in enumerate(self.clients):
                if client is not None:
                    group.create_task(
                        self._shutdown_client(client, timeout_s),
                        name=f"stop {self.name}/{replica_id}",
                    )
        self.clients = [None] * len(self.clients)
        if self._closing:
            await asyncio.wait(self._closing.values(), timeout=timeout_s)
