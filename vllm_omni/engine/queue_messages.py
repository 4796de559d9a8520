"""What crosses between the API's event loop and the orchestrator's. Same process, typed, closed.

To the orchestrator: `AddRequest`, `AddCompanion`, `UpdateRequest`, `RpcCall` (aborts and the
shutdown signal travel beside the queue, see `mailbox.py`). Back: `ClientOutput` in batches,
`ErrorMessage`, and `RpcResult` on the RPC queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from vllm_omni.engine.graph import RoutePlan
from vllm_omni.engine.messages import StageOutput
from vllm_omni.errors import OmniError, RequestFailedError, error_from_code
from vllm_omni.inputs.prompt import OmniPrompt

if TYPE_CHECKING:
    from vllm_omni.outputs.request_output import StageTimings

_NO_OPTIONS: Mapping[str, object] = {}


class AddRequest(msgspec.Struct, kw_only=True, gc=False):
    """Take this request through the stages of its plan."""

    request_id: str
    """Internal: unique in this process, never the client's own."""
    plan: RoutePlan
    prompt: object
    """For the entry stage, as its preparer returned it."""
    omni_prompt: OmniPrompt
    """What prompt bridges start from."""
    params: tuple[object, ...]
    """By stage id of the pipeline; None for stages that take none."""
    arrival_s: float
    deadline_s: float
    delta: bool = True
    """Texts arrive as deltas; False: each is cumulative, the later one stands."""
    options: Mapping[str, object] = _NO_OPTIONS
    contexts: Mapping[str, dict[str, object]] = _NO_OPTIONS  # type: ignore[assignment]
    """By source stage's name: `StreamSource.context` of the streams it writes."""
    session_id: str | None = None
    """Set for a realtime or duplex session: its input may be updated while it runs."""
    attempt: int = 1
    """2: it is submitted again, since its replica died before anything of it reached the client."""
    may_wait: bool = False
    """A stage without a replica does not fail it while one is expected before its deadline."""


class AddCompanion(msgspec.Struct, kw_only=True, gc=False):
    """A second prompt that must reach the next stage together with its parent's (guidance)."""

    request_id: str
    parent_id: str
    prompt: object
    params: object


class UpdateRequest(msgspec.Struct, kw_only=True, gc=False):
    """More input for a running session."""

    request_id: str
    prompt: object
    params: object
    final: bool = False


class RpcCall(msgspec.Struct, kw_only=True, gc=False):
    """Call a method in every live replica of some stages."""

    call_id: int
    method: str
    args: tuple[object, ...] = ()
    stage_ids: tuple[int, ...] = ()
    """Empty: all stages."""
    timeout_s: float = 60.0


ToOrchestrator = AddRequest | AddCompanion | UpdateRequest | RpcCall


class ClientOutput(msgspec.Struct, gc=False):
    """One output of an emitting stage on its way to the client."""

    request_id: str
    stage_id: int
    output: StageOutput
    delta: bool
    timings: dict[str, StageTimings] | None = None
    """Set on the request's last output, all stages included."""

    def merged_with(self, later: ClientOutput) -> ClientOutput:
        """This output and a later one of the same stage and request as one."""
        return ClientOutput(
            self.request_id,
            self.stage_id,
            self.output.merged_with(later.output, delta=self.delta),
            self.delta,
            later.timings,
        )


class ErrorMessage(msgspec.Struct, gc=False):
    """A request failed (`request_id` set), or the engine as a whole (fatal, no `request_id`)."""

    error: str
    fatal: bool = False
    request_id: str | None = None
    stage_id: int | None = None
    type: str = "error"
    code: str = RequestFailedError.code
    """Names the error class of `errors.py` that the client sees."""
    field: str | None = None

    def to_error(self) -> OmniError:
        return error_from_code(self.code, self.error, self.field)


class RpcResult(msgspec.Struct, gc=False):
    """What the replicas answered to an `RpcCall`, in the order of stage and replica ids."""

    call_id: int
    results: tuple[object, ...] = ()
    error: str | None = None
