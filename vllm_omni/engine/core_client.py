"""vLLM's client of one engine core process, with what it leaves to whoever owns the process.

A client made for given addresses never notices the death of its process and never wakes who waits
for a utility.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.utils import EngineZmqListeners
from vllm.v1.executor.abstract import Executor

logger = logging.getLogger(__name__)


class CoreClient(AsyncMPClient):
    """Sends requests to one engine core and receives its outputs. Lives in one event loop."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        listeners: EngineZmqListeners,
    ) -> None:
        """Connect to a core that has said READY; does not wait."""
        self._listeners = listeners  # they close when they are collected
        super().__init__(
            vllm_config,
            executor_class,
            log_stats=True,
            client_addresses={
                "input_address": listeners.addresses.inputs[0],
                "output_address": listeners.addresses.outputs[0],
                "input_listener": listeners.inputs[0].socket,
                "output_listener": listeners.outputs[0].socket,
            },
        )

    def wake(self) -> None:
        """Have the waiting `get_output_async` return outputs that are empty."""
        self.outputs_queue.put_nowait(EngineCoreOutputs())

    def mark_dead(self, error: EngineDeadError) -> None:
        """The process is gone: wake whoever waits for outputs or utilities. Repeatable."""
        self.resources.engine_dead = True
        self.outputs_queue.put_nowait(error)
        futures = list(self.utility_results.values())
        self.utility_results.clear()
        for future in futures:
            if not future.done():
                future.set_exception(error)

    async def stop_requests_async(self, request_ids: Sequence[str]) -> None:
        """Stop requests that are complete, so that their token streams end with `stop`.

        Returns when it is sent: the core answers between two steps, and outputs must not wait.
        """
        call_id = uuid.uuid4().int >> 64
        answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_log_failure)
        self.utility_results[call_id] = answer
        arguments = (self.client_index, call_id, "stop_requests", (list(request_ids),))
        await self._send_input(EngineCoreRequestType.UTILITY, arguments)

    def close(self) -> None:
        """Close the sockets. Repeatable."""
        self.shutdown()
        self.resources.ctx.term()  # every socket is closed: this ends its io threads


def _log_failure(answer: asyncio.Future[None]) -> None:
    if not answer.cancelled() and (error := answer.exception()) is not None:
        logger.debug("requests were not stopped: %s", error)
