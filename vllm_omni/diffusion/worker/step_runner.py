"""The runner of a pipeline that is cut at its denoise step: states of requests, by their ids."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from vllm_omni.diffusion.conditioning import ConditioningCache
from vllm_omni.diffusion.distributed.ranks import Ranks
from vllm_omni.diffusion.executor.jobs import (
    Decode,
    Job,
    Made,
    Prepare,
    Prepared,
    Preview,
    Previewed,
    Result,
    Run,
    Step,
    Stepped,
)
from vllm_omni.diffusion.models.interface import DenoiseState, StepPipeline
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.worker.attachments import Attachments
from vllm_omni.diffusion.worker.device import Device
from vllm_omni.diffusion.worker.isolation import StepIsolation
from vllm_omni.diffusion.worker.model_runner import ModelRunner, Report
from vllm_omni.diffusion.worker.pixels import check_finite, checked_pixels
from vllm_omni.diffusion.worker.self_test import self_test_request

logger = logging.getLogger(__name__)

MAX_STEPS_AHEAD: Final = 1
"""Denoise steps that may still run on the device while the next one is decided and launched."""


class StepRunner(ModelRunner):
    """Prepares, steps, decodes."""

    def __init__(
        self,
        stage: str,
        pipeline: StepPipeline,
        device: Device,
        attachments: Attachments,
        *,
        cache_bytes: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(stage, device, attachments, ranks)
        self._pipeline = pipeline
        self._states: dict[str, DenoiseState] = {}
        self._cache = ConditioningCache(cache_bytes)
        self._steps = StepIsolation(self._denoise)
        self._in_flight: deque[Callable[[], None]] = deque()
        """Waits for the denoise steps that the device has not finished."""
        self._num_forwards = 0
        self._num_stepped = 0

    def __repr__(self) -> str:
        return f"<StepRunner {self._stage} states={len(self._states)} {self._cache!r}>"

    def figures(self) -> Mapping[str, float]:
        return {
            "num_states": len(self._states),
            "num_forwards": self._num_forwards,
            "num_stepped": self._num_stepped,
            "num_cache_hits": self._cache.num_hits,
            "num_cache_misses": self._cache.num_misses,
            "cache_bytes": self._cache.num_bytes,
        }

    def drop(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        for request_id in ids:
            self._states.pop(request_id, None)
        self._attachments.forget(ids)

    def _run(self, job: Job, report: Report) -> Result:
        match job:
            case Prepare(request):
                return self._prepare(request)
            case Step(request_ids):
                return self._step(request_ids)
            case Decode(request_id):
                return self._decode(request_id)
            case Preview(request_id):
                return self._preview(request_id)
            case Run():
                raise AssertionError("this pipeline has steps")

    def _self_test(self) -> None:
        self._try([self_test_request(self._pipeline.capabilities)])

    def warm_up(self, requests: Sequence[DiffusionRequest]) -> None:
        """Run one forward of these together, and make the first one's pixels."""
        with self._device.computing():
            self._try(requests)

    def _try(self, requests: Sequence[DiffusionRequest]) -> None:
        conditionings = self._pipeline.encode(requests)
        states = [
            self._pipeline.prepare(request, conditioning)
            for request, conditioning in zip(requests, conditionings, strict=True)
        ]
        self._denoise(states)
        check_finite(states[0].latents)
        [pixels] = self._pipeline.decode(states[:1])
        checked_pixels(pixels)
        self.drop([request.request_id for request in requests])

    def _prepare(self, request: DiffusionRequest) -> Prepared:
        request_id = request.request_id
        try:
            state = self._retried(lambda: self._initial_state(request))
            key = self._pipeline.batch_key(state), request.lora, request.lora_scale
        except Exception as error:  # noqa: BLE001 - the boundary of one request
            return Prepared(request_id, failure=self._failure(request_id, error))
        self._states[request_id] = state
        return Prepared(request_id, key, state.step_index, state.num_steps)

    def _initial_state(self, request: DiffusionRequest) -> DenoiseState:
        key = self._pipeline.conditioning_key(request)
        conditioning = self._cache.get(key)
        if conditioning is None:
            [conditioning] = self._pipeline.encode([request])
            self._cache.put(key, conditioning, self._pipeline.conditioning_bytes(conditioning))
        return self._pipeline.prepare(request, conditioning)

    def _give_memory_back(self) -> None:
        self._cache.clear()
        super()._give_memory_back()

    def _step(self, request_ids: Sequence[str]) -> Stepped:
        states = [s for i in request_ids if (s := self._states.get(i)) is not None]  # else dropped
        errors = self._steps.step(self._pipeline.batch_key(states[0]), states) if states else {}
        for request_id in errors:
            self._states.pop(request_id, None)
        self._attachments.forget(i for i in request_ids if i not in self._states)
        failures = {i: self._failure(i, error) for i, error in errors.items()}
        return Stepped(tuple(request_ids), failures)

    def _denoise(self, states: Sequence[DenoiseState]) -> None:
        with self._ranks.step():
            self._ranks.all_or_none(lambda: self._attachments.before_step(states))
            self._pipeline.denoise_step(states)
            self._num_forwards += 1
            self._num_stepped += len(states)
            self._in_flight.append(self._device.fence())
            while len(self._in_flight) > MAX_STEPS_AHEAD:
                self._in_flight.popleft()()

    def _decode(self, request_id: str) -> Made:
        state = self._states.get(request_id)
        if state is None:  # dropped
            return Made(request_id)
        try:
            check_finite(state.latents)
            [pixels] = self._retried(lambda: self._pipeline.decode([state]), tiled=True)
            made = Made(request_id, checked_pixels(pixels))
        except Exception as error:  # noqa: BLE001 - the boundary of one request
            made = Made(request_id, failure=self._failure(request_id, error))
        self.drop([request_id])
        return made

    def _preview(self, request_id: str) -> Previewed:
        state = self._states.get(request_id)
        if state is None:  # dropped
            return Previewed(request_id, None)
        try:
            pixels = self._pipeline.preview(copy.copy(state))
            return Previewed(request_id, checked_pixels(pixels) if pixels is not None else None)
        except Exception:  # it is no part of the result: the request goes on
            logger.exception("stage %s: no preview of request %s", self._stage, request_id)
            return Previewed(request_id, None)
