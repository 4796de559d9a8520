"""AsyncOmni: a pipeline as vLLM's `EngineClient`, for an event loop.

To vLLM's serving classes it is the engine of the stage that reads chat prompts. Lives on one
event loop of the API process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from vllm.engine.protocol import EngineClient

from vllm_omni.config.deploy import ResolvedConfig
from vllm_omni.config.pipeline import Task
from vllm_omni.engine.launcher import StageLauncher
from vllm_omni.engine.metrics_protocol import EngineMetrics
from vllm_omni.engine.stage_client import TextPreparer
from vllm_omni.entrypoints.engine_methods import EngineMethods
from vllm_omni.entrypoints.omni_base import config_of
from vllm_omni.entrypoints.request_stream import RequestStreams, Wish
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.outputs.request_output import OmniRequestOutput


class AsyncOmni(RequestStreams, EngineMethods, EngineClient):
    """Serves one pipeline to one event loop."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: ResolvedConfig | None = None,
        deploy_config: str | Path | None = None,
        stage_overrides: Sequence[str] = (),
        launcher: StageLauncher | None = None,
        metrics: EngineMetrics | None = None,
        start: bool = True,
        **engine_options: object,
    ) -> None:
        """Load a pipeline and start all its stages; blocks, as vLLM's own engine does.

        `AsyncOmni.create` does the same without blocking the loop.

        Args:
            model: model folder; or give a `config` that was resolved already.
            deploy_config: YAML that says where and how the stages run.
            stage_overrides: `NAME.FIELD=VALUE`, as after `--stage` on the command line.
            start: False: `start()` is called later.
            engine_options: options of the server and of vLLM's engine, by their own names.

        Raises:
            OmniError: an option is wrong or a stage did not start; nothing is left running.
        """
        config = config_of(
            "AsyncOmni",
            model,
            config,
            deploy_config=deploy_config,
            stage_overrides=stage_overrides,
            engine_options=engine_options,
        )
        super().__init__(config, launcher=launcher, metrics=metrics)
        self._internal_ids: dict[str, list[str]] = {}
        self._names = itertools.count()
        if start:
            self.start()

    def __repr__(self) -> str:
        return f"<AsyncOmni {self.pipeline.model_type} {self.engine!r}>"

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> AsyncOmni:
        """Make and start one without blocking the loop; takes what the constructor takes.

        Raises:
            OmniError: a stage did not start; everything is stopped again.
        """
        omni = await asyncio.to_thread(cls, *args, **kwargs, start=False)
        starting = asyncio.get_running_loop().run_in_executor(None, omni.start)
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.to_thread(omni.engine.shutdown)
            await asyncio.wait([starting])
            starting.exception()  # that it was stopped; asyncio would tell it as forgotten
            raise
        return omni

    async def __aenter__(self) -> AsyncOmni:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self, drain_s: float = 0.0) -> None:
        """Stop without blocking the loop; running requests get `drain_s` to end."""
        await asyncio.to_thread(self.shutdown, drain_s)
        await self._router.stop()
        if self._board is not None:
            await self._board.stop()

    def start(self) -> None:
        """Start every stage; blocks until all are ready. Repeatable."""
        super().start()
        chat = self.pipeline.entries.get(Task.CHAT)
        if chat is None:
            return
        preparer = cast(TextPreparer, self.preparer(chat))
        self.vllm_config = preparer.vllm_config
        self.model_config = preparer.model_config
        self.renderer = preparer.renderer
        self.input_processor = preparer.input_processor

    def generate(  # noqa: PLR0913  vLLM's signature and ours
        self,
        prompt: object,
        sampling_params: object = None,
        request_id: str | None = None,
        *,
        task: Task | None = None,
        output_modalities: Sequence[str] | None = None,
        sampling_params_list: Sequence[object] | None = None,
        speech: SpeechParams | None = None,
        deadline_s: float | None = None,
        prompt_text: str | None = None,
        lora_request: object = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: object = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Run one request; yields outputs as stages produce them.

        Text follows the `output_kind` of its params, audio comes as new samples. Every output
        names its stage and choice; the last has `finished` and the timings of every stage.
        Closing the generator aborts the request in every stage.

        Args:
            prompt: text, vLLM's prompt dictionaries, what its renderer made, `{"messages": ...}`,
                or an OmniPrompt.
            task: None: chat, or what else the pipeline does.
            sampling_params: for the stage that does the task; `n` asks for several choices.
            output_modalities: what the client wants; None: all that the pipeline writes.
            sampling_params_list: one entry for each stage of the pipeline, None for the default.
            speech: for the stages that speak.
            deadline_s: seconds from now; None: the server's `request_timeout_s`.

        Raises:
            OmniError: on the first iteration or later, at once for an argument of a wrong type;
                its class says which status it is.
        """
        given = {
            "prompt_text": prompt_text,
            "lora_request": lora_request,
            "tokenization_kwargs": tokenization_kwargs,
            "trace_headers": trace_headers,
            "priority": priority or None,
            "data_parallel_rank": data_parallel_rank,
            "session_id": session_id,
            "kv_hints": kv_hints,
            "reasoning_ended": reasoning_ended,
            "reasoning_parser_kwargs": reasoning_parser_kwargs,
        }
        wish = Wish(
            task=task or self.pipeline.default_task,
            output_modalities=output_modalities,
            sampling_params=sampling_params,
            sampling_params_list=sampling_params_list,
            speech=speech,
            timeout_s=deadline_s,
            options={name: value for name, value in given.items() if value is not None},
        )
        return self._stream(prompt, request_id or f"omni-{next(self._names)}", wish)

    async def check_request(
        self, prompt: object, sampling_params: object = None, *, task: Task | None = None
    ) -> None:
        """Refuse what `generate` would refuse before it starts anything; takes no place.

        Raises:
            BadRequestError: names the field.
        """
        wish = Wish(task=task or self.pipeline.default_task, sampling_params=sampling_params)
        await self._prepare(prompt, "check", wish, time.monotonic(), self.limits.request_timeout_s)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Stop requests by the ids that `generate` was given; unknown ids are ignored.

        Their generators end with an error that says so.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for one in ids:
            self._abort_requests(self._internal_ids.get(one, ()))

    def _track(self, request_id: str, internal_ids: Sequence[str]) -> None:
        self._internal_ids.setdefault(request_id, []).extend(internal_ids)

    def _untrack(self, request_id: str, internal_ids: Sequence[str]) -> None:
        known = self._internal_ids.get(request_id)
        if known is None:
            return
        remaining = [one for one in known if one not in internal_ids]
        if remaining:
            self._internal_ids[request_id] = remaining
        else:
            del self._internal_ids[request_id]
