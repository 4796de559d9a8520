"""Calls into replicas and their answers, on the API's event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import janus

from vllm_omni.engine.omni_engine import MAX_RPC_CALLS, OmniEngine
from vllm_omni.engine.queue_messages import ErrorMessage, RpcCall, RpcResult
from vllm_omni.errors import EngineStoppedError, OverloadedError, RequestFailedError


class RpcBoard:
    """Who waits for which call. The death of the engine wakes all of them."""

    def __init__(self, engine: OmniEngine) -> None:
        self._engine = engine
        self._waiting: dict[int, asyncio.Future[tuple[object, ...]]] = {}
        self._ids = itertools.count()
        self._reader: asyncio.Task[None] | None = None

    async def call(
        self,
        method: str,
        args: tuple[object, ...] = (),
        *,
        stage_ids: Sequence[int] = (),
        timeout_s: float = 60.0,
    ) -> tuple[object, ...]:
        """Call a method in every live replica of some stages; all when none are named.

        Raises:
            OverloadedError: too many calls wait already.
            RequestFailedError: a replica refused, failed or did not answer in time.
            EngineStoppedError: the engine has stopped.
        """
        if len(self._waiting) >= MAX_RPC_CALLS:
            raise OverloadedError(f"{MAX_RPC_CALLS} calls into replicas wait already")
        if self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read(), name="rpc results")
        call = RpcCall(
            call_id=next(self._ids),
            method=method,
            args=args,
            stage_ids=tuple(stage_ids),
            timeout_s=timeout_s,
        )
        future: asyncio.Future[tuple[object, ...]] = asyncio.get_running_loop().create_future()
        self._waiting[call.call_id] = future
        try:
            self._engine.inbox.put(call)
            return await future
        finally:
            del self._waiting[call.call_id]

    async def stop(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        self._fail_all("the engine has stopped")

    async def _read(self) -> None:
        try:
            while True:
                self._deliver(await self._engine.rpc_queue.async_q.get())
        except janus.AsyncQueueShutDown:
            self._fail_all("the engine has stopped")

    def _deliver(self, message: RpcResult | ErrorMessage) -> None:
        if isinstance(message, ErrorMessage):
            self._fail_all(message.error)
            return
        future = self._waiting.get(message.call_id)
        if future is None or future.done():
            return
        if message.error is not None:
            future.set_exception(RequestFailedError(message.error))
        else:
            future.set_result(message.results)

    def _fail_all(self, text: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineStoppedError(text))
