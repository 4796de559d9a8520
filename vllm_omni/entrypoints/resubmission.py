"""Whether a request whose replica died is submitted once more: a decision, without a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from vllm_omni.engine.fault_isolation import Supervision
from vllm_omni.engine.queue_messages import AddRequest
from vllm_omni.engine.stage_pool import StagePool

MAX_ATTEMPTS: Final = 2


def next_attempt(
    message: AddRequest,
    mode: str,
    pools: Sequence[StagePool],
    supervision: Supervision,
    now_s: float,
) -> AddRequest | None:
    """The request's next attempt, still with its old id and prompt; None when it must fail.

    `mode` is `ServerLimits.resubmit`. A session is never submitted again: the input it was given
    since it began is gone.
    """
    if mode == "never" or message.attempt >= MAX_ATTEMPTS or message.session_id is not None:
        return None
    if now_s >= message.deadline_s:
        return None
    for stage_id in message.plan.stages:
        if pools[stage_id].available_replica_ids():
            continue
        if mode != "wait" or not supervision.expects(stage_id, message.deadline_s):
            return None
    return msgspec.structs.replace(message, attempt=message.attempt + 1, may_wait=mode == "wait")
