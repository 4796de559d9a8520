"""What our model runner adds to vLLM's first one, which a CPU has: `gpu_runner` is for the second.

For a stage that conditions others it keeps rows of the forward; for a conditioned stage it writes
the inputs and runs the model's part after sampling. Every hook of vLLM's that is used here is named
in `tests/vllm_compat/test_runner_contract.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_omni.core.conditioning import REPETITION_KEY
from vllm_omni.core.stage_scheduler import updates_of
from vllm_omni.worker.conditioned_inputs import ConditionedInputs, Scheduled
from vllm_omni.worker.conditioned_model import SampledBatch
from vllm_omni.worker.seen_tokens import SeenTokens
from vllm_omni.worker.sent_rows import ReadPrompt, rows_of_stage
from vllm_omni.worker.stage_options import StageOptions
from vllm_omni.worker.step_output import CodesOnTheWay, PendingStep, with_payloads
from vllm_omni.worker.transfer import on_device

# vLLM's runner, which is behind this class in the bases of every runner, is untyped to us:
# attributes below that are not set here and methods that `super()` finds are its own. Hence the
# ignored errors.


class StageRunnerMixin:
    """Put before a runner of vLLM's in a class's bases."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        options = StageOptions.of(vllm_config.additional_config)
        self._capture, self._sent = rows_of_stage(options)
        self._is_conditioned = options.is_conditioned
        self._inputs: ConditionedInputs | None = None
        self._seen: SeenTokens | None = None
        self._step: Any = None
        """The state of the step that is being sampled."""
        self._parts: list[Scheduled] = []
        """What that step read of each request, by row of the batch."""
        self._codes: torch.Tensor | None = None
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self._capture is not None and self._capture.aux_layers:
            record_layers(self.model, self._capture.aux_layers)  # type: ignore[attr-defined]
            self.use_aux_hidden_state_outputs = True
        if self._is_conditioned:
            self._inputs = ConditionedInputs(
                self.get_model(),  # type: ignore[attr-defined]
                self.dtype,  # type: ignore[attr-defined]
                self.device,  # type: ignore[attr-defined]
            )
            self._seen = SeenTokens(
                self.model_config.get_vocab_size(),  # type: ignore[attr-defined]
                self.max_num_reqs,  # type: ignore[attr-defined]
                self.device,  # type: ignore[attr-defined]
            )

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        super().reload_weights(*args, **kwargs)  # type: ignore[misc]
        if self._inputs is not None:
            self._inputs.take_weights()

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        if self._capture is not None:
            (group,) = kv_cache_config.kv_cache_groups
            self._capture.allocate(
                kv_cache_config.num_blocks,
                group.kv_cache_spec.block_size,
                self.model_config.get_hidden_size(),  # type: ignore[attr-defined]
                self.dtype,  # type: ignore[attr-defined]
                self.device,  # type: ignore[attr-defined]
            )

    def _update_states(self, scheduler_output: Any) -> Any:
        if self._sent is not None:
            self._sent.finish(scheduler_output.finished_req_ids)
            for new in scheduler_output.scheduled_new_reqs:
                self._sent.begin(new.req_id, new.sampling_params)
        if self._inputs is not None:
            self._inputs.finish(scheduler_output.finished_req_ids)
            self._inputs.update(updates_of(scheduler_output))
        if self._seen is not None:
            self._watch(self._seen, scheduler_output)
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _watch(self, seen: SeenTokens, scheduler_output: Any) -> None:
        seen.finish(scheduler_output.finished_req_ids)
        for new in scheduler_output.scheduled_new_reqs:
            penalty = ((new.sampling_params.extra_args or {}) if new.sampling_params else {}).get(
                REPETITION_KEY, 1.0
            )
            if penalty != 1.0:
                seen.add(new.req_id, new.prompt_token_ids or (), penalty)

    def _init_mrope_positions(self, req_state: Any) -> None:
        positions = None
        if self._inputs is not None:
            positions = self._inputs.positions(req_state.req_id)
        if positions is None:
            super()._init_mrope_positions(req_state)  # type: ignore[misc]
            return
        req_state.mrope_positions = torch.from_numpy(positions)
        req_state.mrope_position_delta = int(positions.max()) + 1 - positions.shape[1]

    def _preprocess(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inputs is None:
            return super()._preprocess(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        scheduled = self._scheduled(scheduler_output)
        # Else vLLM looks up embeddings of tokens that are never read.
        self._inputs.disclaim(self.is_token_ids.np, scheduled)  # type: ignore[attr-defined]
        result = super()._preprocess(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        assert result[1] is not None, "a conditioned stage reads embeddings"
        self._inputs.fill(result[1], scheduled)
        return result

    def _scheduled(self, scheduler_output: Any) -> list[Scheduled]:
        return [
            Scheduled(
                request_id,
                self.requests[request_id].num_computed_tokens,  # type: ignore[attr-defined]
                scheduler_output.num_scheduled_tokens[request_id],
            )
            for request_id in self.input_batch.req_ids  # type: ignore[attr-defined]
        ]

    def sample_tokens(self, grammar_output: Any) -> Any:
        self._step = step = self.execute_model_state  # type: ignore[attr-defined]
        if step is None:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        self._parts = self._scheduled(step.scheduler_output)
        if self._capture is not None:
            self._keep_rows(step)
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        pending = self._pending(self._parts)
        self._step = self._codes = None
        return with_payloads(output, pending)

    def _keep_rows(self, step: Any) -> None:
        assert self._capture is not None, "only called where rows are kept"
        num_tokens = step.scheduler_output.total_num_scheduled_tokens
        slots = next(iter(step.slot_mappings.values()))[:num_tokens]
        self._capture.keep(step.hidden_states, step.aux_hidden_states, slots)

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        request_ids = self.input_batch.req_ids  # type: ignore[attr-defined]
        if self._seen is not None and self._step is not None and logits is not None:
            logits = self._seen.penalised(logits, request_ids)
        sampled = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        if self._inputs is not None and self._seen is not None and self._step is not None:
            token_ids, positions = sampled.sampled_token_ids[:, 0], self._sampled_positions()
            self._seen.note(token_ids, request_ids, [at is not None for at in positions])
            self._run_after_sampling(self._inputs, token_ids, positions)
        return sampled

    def _run_after_sampling(
        self,
        inputs: ConditionedInputs,
        token_ids: torch.Tensor,
        positions: Sequence[tuple[str, int] | None],
    ) -> None:
        """What the model makes of the sampled tokens, and where it will be fed."""
        batch, requests = self.input_batch, self.requests  # type: ignore[attr-defined]
        metadata = batch.sampling_metadata
        seeds = [requests[request_id].sampling_params for request_id in batch.req_ids]
        self._codes, base = self.get_model().after_sampling(  # type: ignore[attr-defined]
            SampledBatch(
                self._step.sample_hidden_states,
                token_ids,
                tuple(params.temperature == 0 for params in seeds),
                tuple(metadata.generators.get(i) for i in range(len(seeds))),
            )
        )
        inputs.keep(base, positions)

    def _sampled_positions(self) -> list[tuple[str, int] | None]:
        """Where each sampled token will stand; None for a request that only read its prompt."""
        discarded = self.discard_request_mask.np  # type: ignore[attr-defined]
        return [
            None if discarded[row] else (part.request_id, part.first + part.count)
            for row, part in enumerate(self._parts)
        ]

    def _pending(self, scheduled: Sequence[Scheduled]) -> PendingStep:
        """What goes with the output of this step, by row of the batch."""
        pending = PendingStep()
        if self._codes is not None:
            pending.codes = CodesOnTheWay(self._codes.to("cpu", non_blocking=True))
            discarded = self.discard_request_mask.np  # type: ignore[attr-defined]
            pending.codes.rows = [i for i in range(len(scheduled)) if not discarded[i]]
        if self._capture and self._sent and not self._sent.is_idle:
            due = self._sent.due(scheduled, self._read_prompt)
            slots = [
                self._capture.slots(self._block_ids(each.part.request_id), each.spans)
                for each in due
            ]
            rows = on_device(np.concatenate(slots), self.device) if slots else torch.empty(0)  # type: ignore[attr-defined]
            for each, captured in zip(
                due, self._capture.read(rows, [each.spans for each in due]), strict=True
            ):
                pending.captured[each.row] = [*each.payloads, *captured]
        return pending

    def _block_ids(self, request_id: str) -> Sequence[int]:
        return self.requests[request_id].block_ids[0]  # type: ignore[attr-defined, no-any-return]

    def _read_prompt(self, request_id: str) -> ReadPrompt:
        state = self.requests[request_id]  # type: ignore[attr-defined]
        return ReadPrompt(state.num_prompt_tokens, state.mm_features, lambda: state.mrope_positions)


def record_layers(model: Any, layers: tuple[int, ...]) -> None:
    """Have the forward return the inputs of these layers too."""
    if hasattr(model, "set_aux_hidden_state_layers"):
        model.set_aux_hidden_state_layers(layers)
    else:
        # Classes that do not say so hold one that does.
        model.language_model.model._set_aux_hidden_state_layers(layers)
