"""Calling a method inside replicas (caches, adapters, profiles), on the orchestrator's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from vllm_omni.engine.queue_messages import RpcCall, RpcResult
from vllm_omni.engine.stage_pool import StagePool


async def call_replicas(pools: Sequence[StagePool], call: RpcCall) -> RpcResult:
    """Call a method in every live replica asked for, all at once, within the call's timeout.

    Whatever goes wrong is the caller's to hear, and nobody else's.
    """
    clients = [
        client
        for stage_id in call.stage_ids or range(len(pools))
        for client in pools[stage_id].clients
        if client is not None
    ]
    try:
        async with asyncio.timeout(call.timeout_s):
            results = await asyncio.gather(
                *(client.call_utility_async(call.method, *call.args) for client in clients)
            )
    except TimeoutError:
        return RpcResult(
            call.call_id, error=f"{call.method} did not return within {call.timeout_s:g} s"
        )
    except Exception as error:  # noqa: BLE001  the caller's boundary
        return RpcResult(call.call_id, error=f"{type(error).__name__}: {error}")
    return RpcResult(call.call_id, tuple(results))
