"""The orchestrator's side of one replica: the seam between orchestration and engines.

Runs in the orchestrator's event loop. Three implementations (vLLM's engine core, the one-shot
engine, the diffusion engine) and the fakes in `tests/fakes.py` satisfy it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vllm_omni.config.pipeline import StageKind
from vllm_omni.engine.messages import StageOutput, StageRequest
from vllm_omni.inputs.prompt import OmniPrompt

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.renderers import BaseRenderer
    from vllm.v1.engine.input_processor import InputProcessor


class StageClient(Protocol):
    """One live replica. After it raised `EngineDeadError` once it is never used again."""

    stage_id: int
    replica_id: int
    kind: StageKind
    data_address: str | None
    """Where upstream replicas push chunks for this one; None: it takes no streams."""

    async def add_request_async(self, request: StageRequest) -> None:
        """Start a request: check it and send it off; does not wait for the replica to take it up.

        Raises:
            BadRequestError: this request cannot run here; nothing was started.
            EngineDeadError: the replica is dead.
        """

    async def update_request_async(self, request: StageRequest) -> None:
        """Append input to a running streaming session of the same request id."""

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        """Stop requests; unknown ids are ignored; no output follows.

        Never raises for a dead replica.
        """

    async def source_ended_async(self, request_id: str, stream: str) -> None:
        """The stage that writes a stream of this request has finished writing.

        The stream's end is on its way; a replica that has nothing else to wait for gives the
        request up when it does not come soon. Ids that are not here are ignored; never raises for
        a dead replica. Called only for a client with a `data_address`.
        """

    async def get_outputs_async(self) -> Sequence[StageOutput]:
        """Wait for the next outputs, at least one.

        Raises:
            EngineDeadError: the replica died; raised at once, also while waiting.
        """

    def check_health(self) -> None:
        """Raise EngineDeadError when the replica's process is gone or said it is dead."""

    async def call_utility_async(self, method: str, *args: object) -> object:
        """Call a method inside the replica (`sleep`, `wake_up`, `add_lora`), with a deadline."""

    def metrics(self) -> ReplicaMetrics:
        """Latest figures; cheap."""

    def heartbeat(self) -> Heartbeat | None:
        """The latest heartbeat; None before the first."""

    async def shutdown_async(self, timeout_s: float) -> None:
        """Stop the replica: gracefully within the timeout, then by force.

        Never raises; repeatable.
        """


class Heartbeat(Protocol):
    """What a replica's heartbeat says about going on (`process_status.Heartbeat`)."""

    @property
    def received_s(self) -> float:
        """When it was heard, on `time.monotonic`."""

    @property
    def progress(self) -> float:
        """Grows with every step, forward or command that the replica has completed."""

    @property
    def num_runnable(self) -> float:
        """Requests that it could go on with now, those of a running step included."""


class ReplicaMetrics(Protocol):
    """What a replica says of itself."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...


class StagePreparer(Protocol):
    """The API loop's side of a stage: validates a prompt before anything is admitted.

    One per stage, shared by its replicas. Runs in the API process, off the orchestrator's loop.
    """

    async def prepare(
        self, request_id: str, prompt: OmniPrompt, params: object, options: dict[str, object]
    ) -> object:
        """Turn a prompt into what the stage's client takes as `StageRequest.prompt`.

        Raises:
            BadRequestError: names the field that cannot be served.
        """

    def source_context(self, params: object) -> dict[str, Any]:
        """`StreamSource.context` of the streams this stage writes; empty when bridges need none."""

    def shutdown(self) -> None:
        """Give back threads and memory. Repeatable."""


class TextPreparer(StagePreparer, Protocol):
    """Preparer of a text stage: also what vLLM's serving classes render with."""

    vllm_config: VllmConfig

    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def renderer(self) -> BaseRenderer: ...

    @property
    def input_processor(self) -> InputProcessor: ...

    async def render_messages(
        self,
        messages: object,
        template_kwargs: Mapping[str, object] | None = None,
        processor_kwargs: Mapping[str, object] | None = None,
    ) -> OmniPrompt:
        """A conversation through the chat template; `text` holds what it rendered to.

        Raises:
            BadRequestError: not a conversation, or the template refuses it.
        """
