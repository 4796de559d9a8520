"""One request from the caller's prompt to its last output, on the caller's event loop.

Admission first, then the route, the params and the entry stage's preparer; then one message to
the orchestrator for each choice. One `finally` gives everything back, and leaving the generator
early is the abort.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import msgspec

from vllm_omni.config.pipeline import Modality, Task
from vllm_omni.engine.graph import RoutePlan, compile_plan
from vllm_omni.engine.queue_messages import AddRequest, ClientOutput
from vllm_omni.engine.stage_client import TextPreparer
from vllm_omni.entrypoints.omni_base import OmniBase
from vllm_omni.entrypoints.output_collector import OutputCollector
from vllm_omni.entrypoints.prompts import (
    DeferredPrompt,
    check_audio,
    check_placeholders,
    parse_prompt,
    render_messages,
    take_images,
)
from vllm_omni.entrypoints.resubmission import next_attempt
from vllm_omni.entrypoints.stage_params import RequestParams, num_choices_of
from vllm_omni.errors import BadRequestError, DeadlineExceededError, EngineStoppedError
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.outputs.request_output import OmniRequestOutput

OutputStream: TypeAlias = AsyncGenerator[OmniRequestOutput, None]

_TEXT = frozenset({Modality.TEXT})


@dataclass(slots=True, kw_only=True)
class Wish:
    """What a caller asks for, beside the prompt."""

    task: Task = Task.CHAT
    output_modalities: Sequence[str] | None = None
    sampling_params: object = None
    sampling_params_list: Sequence[object] | None = None
    speech: SpeechParams | None = None
    timeout_s: float | None = None
    session_id: str | None = None
    final_only: bool = False
    """Nobody reads text while it is written."""
    options: dict[str, object] = field(default_factory=dict)
    """vLLM's per-request options."""

    def __post_init__(self) -> None:
        """Raises BadRequestError for what could not even be looked through."""
        per_stage, wanted = self.sampling_params_list, self.output_modalities
        if per_stage is not None and not isinstance(per_stage, list | tuple):
            raise BadRequestError(
                "sampling_params_list is a list with one entry for each stage, not "
                f"{type(per_stage).__name__}",
                field="sampling_params_list",
            )
        is_list = isinstance(wanted, Collection) and not isinstance(wanted, str)
        if wanted is not None and not is_list:
            raise BadRequestError(
                f"output_modalities is a list of names, not {type(wanted).__name__}",
                field="output_modalities",
            )
        if not isinstance(self.task, Task):
            raise BadRequestError(f"task is a Task, not {self.task!r}", field="task")

    @property
    def num_choices(self) -> int:
        """Places the request takes. Params that are impossible are refused later."""
        num = 1
        for given in (self.sampling_params, *(self.sampling_params_list or ())):
            asked = num_choices_of(given)
            if asked > num:
                num = asked
        return num


class RequestStreams(OmniBase):
    """The base of both front ends: everything that runs requests."""

    async def _stream(self, prompt: object, request_id: str, wish: Wish) -> OutputStream:
        """Yield outputs as stages produce them; leaving early aborts the request."""
        if self.errored:
            raise self.dead_error
        if self.engine.is_stopping:
            raise EngineStoppedError("the engine is shutting down")
        arrival_s = time.monotonic()
        timeout_s = self._timeout_s(wish)
        num_choices = wish.num_choices
        self._admission.acquire(num_choices)
        internal_ids: list[str] = []
        try:
            self._router.start()
            messages = await self._prepare(prompt, request_id, wish, arrival_s, timeout_s)
            internal_ids = [message.request_id for message in messages]
            collector = OutputCollector(len(messages))
            self._router.open(internal_ids, collector)
            self._track(request_id, internal_ids)
            for message in messages:
                self.engine.inbox.put(message)
            while collector.num_open:
                if collector.lost:
                    await self._submit_again(request_id, collector, messages, internal_ids)
                taken = collector.take()
                if taken is None:
                    await collector.wait()
                    continue
                index, output = taken
                yield self._to_output(request_id, index, output, not collector.num_open)
        finally:
            self._admission.release(num_choices)
            self._untrack(request_id, internal_ids)
            unfinished = self._router.close(internal_ids)
            if unfinished:
                self.engine.inbox.abort(unfinished)

    def _timeout_s(self, wish: Wish) -> float:
        """Seconds until the deadline. No request is without one."""
        timeout_s = wish.timeout_s
        if timeout_s is None:
            return self.limits.request_timeout_s
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise BadRequestError(
                f"a deadline is a finite time above 0 s, got {timeout_s}", field="deadline_s"
            )
        return timeout_s

    async def _submit_again(
        self,
        request_id: str,
        collector: OutputCollector,
        messages: list[AddRequest],
        internal_ids: list[str],
    ) -> None:
        """Start choices anew whose replica died before anything of them reached the caller.

        Raises:
            ReplicaDiedError: one cannot be taken by another replica, or was started anew before.
        """
        lost, collector.lost = collector.lost, {}
        for index, death in lost.items():
            again = next_attempt(
                messages[index],
                self.limits.resubmit,
                self.engine.stage_pools,
                self.engine.supervisor,
                time.monotonic(),
            )
            if again is None:
                raise death.to_error()
            # An id of its own: nothing of the first attempt, chunks of streams included, meets it.
            internal_id = self.engine.internal_id(request_id)
            internal_ids.append(internal_id)
            self._router.open_choice(internal_id, collector, index)
            self._track(request_id, [internal_id])
            messages[index] = again = await self._prepare_again(again, internal_id)
            if internal_id not in self._router:
                return  # aborted meanwhile
            if death.stage_id is not None:
                self.metrics.request_resubmitted(self.pipeline.stages[death.stage_id].name)
            self.engine.inbox.put(again)

    async def _prepare_again(self, message: AddRequest, internal_id: str) -> AddRequest:
        entry = message.plan.entry
        async with self._preparing(message.arrival_s, message.deadline_s):
            own_prompt, params = await self._entry_prompts.make(
                internal_id, message.plan, self._preparers, message.omni_prompt, message.params
            )
            prompt = await self._preparers[entry].prepare(
                internal_id, own_prompt, params[entry], dict(message.options)
            )
        return msgspec.structs.replace(message, request_id=internal_id, prompt=prompt)

    @staticmethod
    @asynccontextmanager
    async def _preparing(arrival_s: float, deadline_s: float) -> AsyncIterator[None]:
        """End the preparation of a prompt with its request's deadline."""
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                yield
        except TimeoutError:
            raise DeadlineExceededError(
                f"deadline of {deadline_s - arrival_s:g} s exceeded: its prompt was being prepared"
            ) from None

    def _track(self, request_id: str, internal_ids: Sequence[str]) -> None:
        """A request begins; front ends that can abort by the caller's id remember it."""

    def _untrack(self, request_id: str, internal_ids: Sequence[str]) -> None:
        """The request is over."""

    async def _prepare(
        self, prompt: object, request_id: str, wish: Wish, arrival_s: float, timeout_s: float
    ) -> list[AddRequest]:
        """Validate a request and make its message for each choice.

        Raises:
            BadRequestError: it cannot be served.
            DeadlineExceededError: its deadline passed while its prompt was prepared.
        """
        async with self._preparing(arrival_s, arrival_s + timeout_s):
            omni_prompt = await self._parse(prompt, wish.task)
            plan = compile_plan(
                self.pipeline,
                wish.task,
                omni_prompt.modalities,
                self._outputs_wanted(wish.output_modalities) if wish.task is Task.CHAT else _TEXT,
            )
            params = self._params.resolve(
                plan,
                wish.task,
                wish.sampling_params,
                wish.sampling_params_list,
                wish.speech,
                final_only=wish.final_only,
            )
            return [
                await self._prepare_choice(
                    index, plan, params, omni_prompt, request_id, wish, arrival_s, timeout_s
                )
                for index in range(params.num_choices)
            ]

    async def _prepare_choice(  # noqa: PLR0913  one message has that many parts
        self,
        index: int,
        plan: RoutePlan,
        params: RequestParams,
        omni_prompt: OmniPrompt,
        request_id: str,
        wish: Wish,
        arrival_s: float,
        timeout_s: float,
    ) -> AddRequest:
        internal_id = self.engine.internal_id(request_id)
        own_prompt, by_stage = await self._entry_prompts.make(
            internal_id, plan, self._preparers, omni_prompt, params.of_choice(index)
        )
        prepared = await self._preparers[plan.entry].prepare(
            internal_id, own_prompt, by_stage[plan.entry], wish.options
        )
        contexts = {
            stage.name: self._preparers[stage_id].source_context(by_stage[stage_id])
            for stage_id, stage in plan.stages.items()
            if stage.stream_targets
        }
        return AddRequest(
            request_id=internal_id,
            plan=plan,
            prompt=prepared,
            omni_prompt=omni_prompt,
            params=by_stage,
            arrival_s=arrival_s,
            deadline_s=arrival_s + timeout_s,
            delta=params.delta,
            options=wish.options,
            contexts=contexts,
            session_id=wish.session_id,
        )

    async def _parse(self, prompt: object, task: Task) -> OmniPrompt:
        """A prompt in any form as an OmniPrompt, checked as far as no stage is needed."""
        if isinstance(prompt, DeferredPrompt):
            parsed = await prompt.load()
        elif isinstance(prompt, dict) and "messages" in prompt:
            if task is not Task.CHAT:
                raise BadRequestError("only a chat takes messages", field="prompt")
            chat = cast(TextPreparer, self.preparer(self.pipeline.entries[Task.CHAT]))
            parsed = await render_messages(prompt, self.pipeline, chat)
        else:
            parsed = parse_prompt(prompt)
        if task in (Task.IMAGE, Task.VIDEO):
            parsed = take_images(parsed)
        if parsed.audio:
            check_audio(parsed.audio, self.limits)
        if task is Task.CHAT:
            main = self.pipeline.stages[self.pipeline.stage_id(self.pipeline.entries[task])]
            check_placeholders(parsed, self.pipeline, main)
        return parsed

    def _to_output(
        self, request_id: str, index: int, message: ClientOutput, is_finished: bool
    ) -> OmniRequestOutput:
        text = message.output.text
        if text is not None:
            text.request_id = request_id
            if index:
                for completion in text.outputs:
                    completion.index = index
        made = message.output
        frames, preview = made.frames, made.preview
        return OmniRequestOutput(
            request_id=request_id,
            stage=self.pipeline.stages[message.stage_id].name,
            index=index,
            finished=is_finished,
            request_output=text,
            audio=made.audio,
            images=[frames.image()] if frames is not None and not frames.is_video else [],
            video=frames if frames is not None and frames.is_video else None,
            preview=preview.image() if preview is not None else None,
            progress=made.progress,
            timings=message.timings if is_finished and message.timings is not None else {},
        )
