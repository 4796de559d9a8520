"""vLLM's `EngineClient` over `AsyncOmni`: what vLLM's serving classes call instead of an engine.

One client serves one task with the renderer of the stage that does it. `for_request` binds a copy
to one HTTP request; its `generate` then starts the whole pipeline and gives out the text.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm import PoolingRequestOutput, RequestOutput, SamplingParams
from vllm.engine.protocol import EngineClient

from vllm_omni.config.pipeline import Task
from vllm_omni.entrypoints.openai.params import check_extra_args
from vllm_omni.entrypoints.openai.request_stream import RequestScope, RequestStream
from vllm_omni.inputs.prompt import OmniPrompt

if TYPE_CHECKING:
    from vllm.tasks import SupportedTask

    from vllm_omni.entrypoints.async_omni import AsyncOmni


class OmniEngineClient(EngineClient):  # type: ignore[misc]
    """One task of the pipeline as an engine of vLLM."""

    def __init__(self, omni: AsyncOmni, task: Task) -> None:
        self._omni = omni
        self._task = task
        self.stage = omni.config.pipeline.entries[task]
        preparer = omni.preparer(self.stage)
        self.vllm_config = preparer.vllm_config
        self.model_config = preparer.vllm_config.model_config
        self.renderer = preparer.renderer
        self.input_processor = preparer.input_processor
        self._scope: RequestScope | None = None

    def for_request(self, scope: RequestScope) -> OmniEngineClient:
        """A copy whose requests belong to one HTTP request."""
        bound = copy.copy(self)
        bound._scope = scope
        return bound

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Start a request; runs when the returned generator is first asked."""
        check_extra_args(sampling_params)
        scope = self._scope if self._scope is not None else RequestScope()
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else None
        stream = RequestStream(
            self._omni.generate(
                OmniPrompt(
                    engine_input=prompt,
                    text=text if isinstance(text, str) else None,
                    audio=scope.audio,
                ),
                request_id=request_id,
                task=self._task,
                modalities=scope.outputs,
                sampling_params={**scope.params, self.stage: sampling_params},
                options={name: value for name, value in options.items() if value is not None},
            )
        )
        scope.streams.append(stream)
        return stream.text_outputs()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        self._omni.check_admission(n)

    async def check_health(self) -> None:
        self._omni.check_health()

    @property
    def is_running(self) -> bool:
        """True while the orchestrator lives: a dead replica is no reason to stop the server."""
        return self._omni.is_running

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        return not self.is_running

    @property
    def dead_error(self) -> BaseException:
        return self._omni.dead_error

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        raise NotImplementedError("this model does not embed")
        yield

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Nothing to do: closing the generator of `generate` is the abort."""

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        """No stage pins blocks for another server."""

    async def is_tracing_enabled(self) -> bool:
        return self.vllm_config.observability_config.otlp_traces_endpoint is not None

    async def do_log_stats(self) -> None:
        """Figures are on /metrics."""

    async def is_sleeping(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return False

    async def start_profile(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("profiling")

    async def stop_profile(self) -> None:
        raise NotImplementedError("profiling")

    async def reset_mm_cache(self) -> None:
        await self.renderer.clear_mm_cache_async()

    async def reset_encoder_cache(self) -> None:
        raise NotImplementedError("resetting the encoder cache")

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        raise NotImplementedError("resetting the prefix cache")

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("sleep")

    async def release_kv_cache_memory(self) -> None:
        raise NotImplementedError("sleep")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        raise NotImplementedError("wake_up")

    async def add_lora(self, lora_request: Any) -> bool:
        raise NotImplementedError("LoRA adapters")

    async def pause_generation(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("pausing")

    async def resume_generation(self) -> None:
        raise NotImplementedError("pausing")

    def shutdown(self, timeout: float | None = None) -> None:
        """`AsyncOmni` is closed by who started it."""
