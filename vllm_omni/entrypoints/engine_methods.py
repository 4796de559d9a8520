"""What vLLM's `EngineClient` asks for beside `generate`, over the replicas of the text stages.

What this server cannot do raises `NotImplementedError`, which vLLM's handlers answer with 501.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from vllm_omni.config.pipeline import StageKind, Task
from vllm_omni.engine.omni_engine import SupervisorAction
from vllm_omni.engine.replica_state import ReplicaStatus
from vllm_omni.entrypoints.omni_base import OmniBase
from vllm_omni.entrypoints.rpc_board import RpcBoard
from vllm_omni.errors import EngineStoppedError, RequestFailedError

logger = logging.getLogger(__name__)

_PROFILE_TIMEOUT_S = 600.0
_SUPERVISE_TIMEOUT_S = 10.0


class EngineMethods(OmniBase):
    """The methods, on one event loop."""

    _board: RpcBoard | None = None

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def errored(self) -> bool:
        return super().errored

    @property
    def dead_error(self) -> BaseException:
        return super().dead_error

    async def check_health(self) -> None:  # type: ignore[override]
        """Raise EngineDeadError when the engine or one of its stages is dead."""
        OmniBase.check_health(self)

    @property
    def num_in_flight(self) -> int:
        """Choices of requests that were admitted and have not ended."""
        return self._admission.in_flight

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse a request at once, before anything is rendered or decoded for it.

        Raises:
            OverloadedError: `n` more would exceed `max_in_flight`.
            EngineStoppedError: the engine has stopped.
        """
        if self.errored:
            self.metrics.request_rejected("stopped")
            raise EngineStoppedError(str(self.dead_error))
        self._admission.check(n)

    def place(self) -> AbstractContextManager[None]:
        """Hold a place while a request is prepared and answered, so that no more are prepared
        than could run. Entering raises OverloadedError."""
        return self._admission.place()

    async def call_stages(
        self,
        method: str,
        *args: object,
        stage_ids: Sequence[int] | None = None,
        timeout_s: float = 60.0,
    ) -> tuple[object, ...]:
        """Call a method in every live replica of some stages; None: of all text stages."""
        if self._board is None:
            self._board = RpcBoard(self.engine)
        return await self._board.call(
            method,
            args,
            stage_ids=self._text_stages() if stage_ids is None else stage_ids,
            timeout_s=timeout_s,
        )

    async def supervise(
        self, action: SupervisorAction, stage: str, replica_id: int
    ) -> ReplicaStatus:
        """Drain or restart a replica; returns what state it is in now, not when it is done.

        Raises:
            UnknownReplicaError: there is no such replica.
            ReplicaStateError: its state forbids it.
            EngineStoppedError: the engine has stopped.
        """
        decided = asyncio.wrap_future(self.engine.supervise(action, stage, replica_id))
        try:
            async with asyncio.timeout(_SUPERVISE_TIMEOUT_S):
                return await decided
        except TimeoutError:
            raise EngineStoppedError("the orchestrator does not answer") from None

    def _text_stages(self) -> list[int]:
        return [
            pool.stage_id
            for pool in self.engine.stage_pools
            if pool.stage_type is StageKind.AUTOREGRESSIVE
        ]

    def _abort_requests(self, internal_ids: Sequence[str]) -> None:
        if internal_ids:
            self._router.fail(internal_ids, RequestFailedError("the request was aborted"))
            self.engine.inbox.abort(internal_ids)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109  vLLM's signature
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> tuple[object, ...]:
        """Call a method of every worker of every text stage; one result for each replica."""
        return await self.call_stages(
            "collective_rpc", method, timeout, args, kwargs, timeout_s=timeout or 60.0
        )

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """vLLM's tasks that its own routes may serve with the chat stage."""
        return ("generate",) if Task.CHAT in self.pipeline.entries else ()

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        in_flight = self._admission.in_flight
        if not in_flight:
            return
        figures = ", ".join(
            f"{one.stage}/{one.replica} running={one.metrics.num_running} "
            f"waiting={one.metrics.num_waiting}"
            for one in self.engine.replica_figures()
            if one.metrics is not None
        )
        logger.info("in flight %d; %s", in_flight, figures)

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        if delay_iterations is not None or max_iterations is not None:
            _cannot("profile a number of iterations")
        await self.call_stages("profile", True, profile_prefix, timeout_s=_PROFILE_TIMEOUT_S)

    async def stop_profile(self) -> None:
        await self.call_stages("profile", False, timeout_s=_PROFILE_TIMEOUT_S)

    async def reset_mm_cache(self) -> None:
        await self.call_stages("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self.call_stages("reset_encoder_cache")

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        results = await self.call_stages(
            "reset_prefix_cache", reset_running_requests, reset_connector
        )
        return all(results)

    async def add_lora(self, lora_request: object) -> bool:
        """Load an adapter in every replica of the chat stage."""
        chat = self.pipeline.stage_id(self.pipeline.entries[Task.CHAT])
        return all(await self.call_stages("add_lora", lora_request, stage_ids=[chat]))

    async def is_sleeping(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return False

    def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[NoReturn, None]:
        _cannot("make embeddings")

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        _cannot("transfer KV caches between servers")

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        _cannot("put stages to sleep")

    async def release_kv_cache_memory(self) -> None:
        _cannot("release KV caches")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        _cannot("put stages to sleep and wake them")

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        _cannot("pause generation")

    async def resume_generation(self) -> None:
        _cannot("pause generation and resume it")


def _cannot(what: str) -> NoReturn:
    raise NotImplementedError(f"this server does not {what}")
