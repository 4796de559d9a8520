"""Omni: a pipeline for scripts. Batches of prompts in, whole results out, in order.

The calling thread only waits: requests run on an event loop of Omni's own thread, over the same
orchestrator as `AsyncOmni`, so it also works where a loop is running already (notebooks).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from vllm_omni.config.deploy import ResolvedConfig
from vllm_omni.config.pipeline import Task
from vllm_omni.engine.launcher import StageLauncher
from vllm_omni.engine.metrics_protocol import EngineMetrics
from vllm_omni.entrypoints.omni_base import config_of
from vllm_omni.entrypoints.request_stream import RequestStreams, Wish
from vllm_omni.errors import EngineStoppedError, OmniError
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.outputs.merging import WholeResult
from vllm_omni.outputs.request_output import OmniRequestOutput

T = TypeVar("T")


class Omni(RequestStreams):
    """Serves one pipeline to the calling thread. Ready when the constructor returns."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: ResolvedConfig | None = None,
        deploy_config: str | Path | None = None,
        stage_overrides: Sequence[str] = (),
        launcher: StageLauncher | None = None,
        metrics: EngineMetrics | None = None,
        **engine_options: object,
    ) -> None:
        """Load a pipeline and start all its stages.

        Args:
            model: model folder; or give a `config` that was resolved already.
            deploy_config: YAML that says where and how the stages run.
            stage_overrides: `NAME.FIELD=VALUE`, as after `--stage` on the command line.
            engine_options: options of the server and of vLLM's engine, by their own names.

        Raises:
            OmniError: an option is wrong or a stage did not start; nothing is left running.
        """
        config = config_of(
            "Omni",
            model,
            config,
            deploy_config=deploy_config,
            stage_overrides=stage_overrides,
            engine_options=engine_options,
        )
        super().__init__(config, launcher=launcher, metrics=metrics)
        self._names = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="omni-front", daemon=True
        )
        self._closed = False
        self._thread.start()
        self.start()

    def __repr__(self) -> str:
        return f"<Omni {self.pipeline.model_type} {self.engine!r}>"

    def __enter__(self) -> Omni:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def generate(
        self,
        prompts: object,
        sampling_params: object = None,
        *,
        sampling_params_list: Sequence[object] | None = None,
        task: Task | None = None,
        output_modalities: Sequence[str] | None = None,
        speech: SpeechParams | None = None,
        use_tqdm: bool = True,
    ) -> list[OmniRequestOutput]:
        """Run a batch; one whole result for each prompt, in their order.

        A prompt that fails has its reason in `error`; the others are served all the same.

        Args:
            prompts: one prompt or a sequence of them: text, vLLM's prompt dictionaries,
                `{"messages": ...}` or OmniPrompts.
            task: None: chat, or what else the pipeline does.
            sampling_params: for the stage that does the task; or a list with one entry for each
                stage of the pipeline, None for the default.
            sampling_params_list: that list, by its name in `AsyncOmni.generate`.
            output_modalities: what is wanted; None: all that the pipeline writes.
            speech: for the stages that speak.

        Raises:
            EngineStoppedError: the engine died or was shut down.
        """
        if self._closed:
            raise EngineStoppedError("this Omni was shut down")
        batch = _as_batch(prompts)
        if isinstance(sampling_params, list | tuple):
            sampling_params, sampling_params_list = None, sampling_params

        def wish() -> Wish:
            return Wish(
                task=task or self.pipeline.default_task,
                output_modalities=output_modalities,
                sampling_params=sampling_params,
                sampling_params_list=sampling_params_list,
                speech=speech,
                final_only=True,
            )

        with tqdm(total=len(batch), desc="requests", disable=not use_tqdm) as bar:
            return self._run(self._generate_all(batch, wish, lambda: bar.update(1)))

    def _run(self, work: Coroutine[object, object, T]) -> T:
        """Wait for work on the other thread's loop; Ctrl-C here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _generate_all(
        self, batch: Sequence[object], wish: Callable[[], Wish], on_done: Callable[[], object]
    ) -> list[OmniRequestOutput]:
        """As many at once as admission takes, in order, without holding all of them."""
        results: list[OmniRequestOutput | None] = [None] * len(batch)
        waiting = iter(enumerate(batch))
        num_workers = max(1, self.limits.max_in_flight // wish().num_choices)
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(num_workers, len(batch))):
                    workers.create_task(self._work(waiting, results, wish, on_done))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [result for result in results if result is not None]

    async def _work(
        self,
        waiting: Iterator[tuple[int, object]],
        results: list[OmniRequestOutput | None],
        wish: Callable[[], Wish],
        on_done: Callable[[], object],
    ) -> None:
        for position, prompt in waiting:
            results[position] = await self._generate_one(prompt, wish())
            on_done()

    async def _generate_one(self, prompt: object, wish: Wish) -> OmniRequestOutput:
        request_id = f"omni-{next(self._names)}"
        whole = WholeResult(request_id)
        try:
            async with aclosing(self._stream(prompt, request_id, wish)) as outputs:
                async for output in outputs:
                    whole.add(output)
        except EngineStoppedError:
            raise
        except OmniError as error:
            return OmniRequestOutput(request_id=request_id, finished=True, error=error)
        return whole.result()

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop every stage and thread. Repeatable."""
        super().shutdown(timeout)
        if self._closed:
            return
        self._closed = True
        self._run(self._router.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _as_batch(prompts: object) -> Sequence[object]:
    if isinstance(prompts, str | Mapping | OmniPrompt):
        return [prompts]
    if isinstance(prompts, Sequence):
        return prompts
    raise TypeError(f"prompts are one prompt or a sequence of them, not {type(prompts).__name__}")
