"""vLLM's `EngineClient` over `AsyncOmni`: what vLLM's serving classes call instead of an engine.

One client serves one task with the renderer of the stage that does it. `for_request` binds a copy
to one HTTP request; its `generate` then starts the whole pipeline and gives out the text.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from vllm import RequestOutput, SamplingParams
from vllm.engine.protocol import EngineClient

from vllm_omni.config.pipeline import Task
from vllm_omni.entrypoints.openai.params import check_extra_args
from vllm_omni.entrypoints.openai.request_scope import RequestScope, RequestStream
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import OmniPrompt

if TYPE_CHECKING:
    from vllm.tasks import SupportedTask

    from vllm_omni.engine.stage_client import TextPreparer
    from vllm_omni.entrypoints.async_omni import AsyncOmni


class OmniEngineClient(EngineClient):  # type: ignore[misc]
    """One task of the pipeline as an engine of vLLM."""

    def __init__(self, omni: AsyncOmni, task: Task) -> None:
        self._omni = omni
        self._task = task
        self.stage = omni.pipeline.entries[task]
        preparer = cast("TextPreparer", omni.preparer(self.stage))
        self.vllm_config = preparer.vllm_config
        self.model_config = preparer.model_config
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
        """Start a request; it runs when the returned generator is first asked."""
        check_extra_args(sampling_params)
        scope = self._scope if self._scope is not None else RequestScope()
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else None
        outputs = self._omni.generate(
            OmniPrompt(
                engine_input=prompt,
                text=text if isinstance(text, str) else None,
                audio=scope.audio,
                # A chat template wrote the text: its special tokens stand in it already.
                extra={"add_special_tokens": False} if scope.audio else {},
            ),
            sampling_params,
            request_id,
            task=self._task,
            output_modalities=sorted(scope.outputs),
            sampling_params_list=scope.params_list(self._omni.pipeline),
            speech=scope.speech,
            **options,
        )
        stream = RequestStream(outputs, sampling_params)
        scope.streams.append(stream)
        return stream.text_outputs()

    @property
    def is_running(self) -> bool:
        """True while the orchestrator lives: a dead replica is no reason to stop the server."""
        return self._omni.is_running

    @property
    def is_stopped(self) -> bool:
        return self._omni.is_stopped

    @property
    def errored(self) -> bool:
        return self._omni.errored

    @property
    def dead_error(self) -> BaseException:
        return self._omni.dead_error

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        self._omni.check_admission(n)

    def check_places(self, n: int, field: str) -> None:
        """Refuse what even an idle server could not admit, then what this one cannot now."""
        limit = self._omni.limits.max_in_flight
        if n > limit:
            raise BadRequestError(f"at most {limit} answers at once, not {n}", field=field)
        self.check_admission(n)

    async def check_health(self) -> None:
        await self._omni.check_health()

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return cast("tuple[SupportedTask, ...]", await self._omni.get_supported_tasks())

    def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        return self._omni.encode(*args, **kwargs)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """By the ids that `generate` was given. Closing its generator aborts a request too."""
        ids = [request_id] if isinstance(request_id, str) else request_id
        # A route of vLLM's passes on whatever a client wrote there.
        known = [one for one in ids if isinstance(one, str)] if isinstance(ids, list) else []
        await self._omni.abort(known)

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        await self._omni.notify_kv_transfer_request_rejected(*args, **kwargs)

    async def is_tracing_enabled(self) -> bool:
        return await self._omni.is_tracing_enabled()

    async def do_log_stats(self) -> None:
        await self._omni.do_log_stats()

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        return await self._omni.collective_rpc(*args, **kwargs)

    async def start_profile(self, *args: Any, **kwargs: Any) -> None:
        await self._omni.start_profile(*args, **kwargs)

    async def stop_profile(self) -> None:
        await self._omni.stop_profile()

    async def reset_mm_cache(self) -> None:
        await self._omni.reset_mm_cache()

    async def reset_encoder_cache(self) -> None:
        await self._omni.reset_encoder_cache()

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        return await self._omni.reset_prefix_cache(*args, **kwargs)

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        await self._omni.sleep(*args, **kwargs)

    async def release_kv_cache_memory(self) -> None:
        await self._omni.release_kv_cache_memory()

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        return await self._omni.wake_up(tags)

    async def is_sleeping(self) -> bool:
        return await self._omni.is_sleeping()

    async def add_lora(self, lora_request: object) -> bool:
        return await self._omni.add_lora(lora_request)

    async def pause_generation(self, *args: Any, **kwargs: Any) -> None:
        await self._omni.pause_generation(*args, **kwargs)

    async def resume_generation(self) -> None:
        await self._omni.resume_generation()

    async def is_paused(self) -> bool:
        return await self._omni.is_paused()

    def shutdown(self, timeout: float | None = None) -> None:
        """`AsyncOmni` is closed by who started it."""
