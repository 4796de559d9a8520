"""Inputs of a conditioned stage in vLLM's second model runner: its state of a model, with ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_omni.worker.conditioned_inputs import ConditionedInputs, Scheduled


def scheduled(batch: InputBatch) -> list[Scheduled]:
    """Each request's part of a step, by row of the batch."""
    return [
        Scheduled(request_id, first, count)
        for request_id, first, count in zip(
            batch.req_ids,
            batch.num_computed_tokens_np.tolist(),
            batch.num_scheduled_tokens.tolist(),
            strict=True,
        )
    ]


class ConditionedState(DefaultModelState):  # type: ignore[misc]  # vLLM is not typed
    """Has embeddings and rotary positions from a bridge. Those of requests that it never heard of
    (vLLM's warm-up) are vLLM's."""

    def __init__(self, *args: Any, inputs: ConditionedInputs, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inputs = inputs

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        positions = self._inputs.positions(new_req_data.req_id)
        if self.rope_state is None or positions is None:
            super().add_request(req_index, new_req_data)
            return
        num_tokens = len(new_req_data.prefill_token_ids or ())
        stage_positions(self.rope_state, req_index, positions, num_tokens)
        if self.prompt_embeds_state is not None:
            self.prompt_embeds_state.add_request(req_index, new_req_data)

    def prepare_inputs_embeds(
        self, scheduled_encoder_inputs: Any, input_batch: InputBatch, req_states: Any
    ) -> torch.Tensor:
        batch = scheduled(input_batch)
        if self._inputs.has_all(batch):
            # No look-up of tokens that are never read.
            embeds = self.dummy_inputs_embeds(input_batch.num_tokens_after_padding)
        else:
            embeds = super().prepare_inputs_embeds(
                scheduled_encoder_inputs, input_batch, req_states
            )
        self._inputs.fill(embeds, batch)
        return embeds


def stage_positions(
    rope: RopeState, req_index: int, positions: np.ndarray[Any, Any], num_tokens: int
) -> None:
    """Rotary positions `[3, prompt]` of a request; after the prompt they count on.

    Args:
        num_tokens: more than the prompt when a request is computed again: what it wrote is read
            as a part of it then.
    """
    delta = int(positions.max()) + 1 - positions.shape[1]
    rope.prefill_delta.np[req_index] = delta
    written = (np.arange(positions.shape[1], num_tokens) + delta).tolist()
    for axis, values in enumerate(positions):
        row = rope.num_dims * req_index + axis
        rope.prefill_positions.stage_write(row, 0, values.tolist() + written)
