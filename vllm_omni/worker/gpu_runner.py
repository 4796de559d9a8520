"""What a CUDA worker's runner adds to vLLM's second one: as `stage_runner` for the first.

For a stage that conditions others it keeps rows of the forward; for a conditioned stage it writes
the inputs (`ConditionedState`) and runs the model's part after sampling. Every hook of vLLM's that
is used here is named in `tests/vllm_compat/test_gpu_runner_contract.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_omni.core.conditioning import REPETITION_KEY
from vllm_omni.core.stage_scheduler import updates_of
from vllm_omni.worker.capture import positions_of
from vllm_omni.worker.conditioned_inputs import ConditionedInputs, Scheduled
from vllm_omni.worker.conditioned_model import SampledBatch
from vllm_omni.worker.conditioned_state import ConditionedState, scheduled
from vllm_omni.worker.sent_rows import DueRows, ReadPrompt, rows_of_stage
from vllm_omni.worker.stage_options import StageOptions
from vllm_omni.worker.stage_runner import record_layers
from vllm_omni.worker.step_output import CodesOnTheWay, PendingStep, with_payloads
from vllm_omni.worker.transfer import on_device

_SAMPLED: Final = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05)
_NUCLEUS: Final = SamplingParams(temperature=0.9, top_k=50, top_p=0.9, repetition_penalty=1.05)


class StageGPURunner(GPUModelRunner):  # type: ignore[misc]  # vLLM is not typed
    """vLLM's runner with our hooks."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        options = StageOptions.of(vllm_config.additional_config)
        self._capture, self._sent = rows_of_stage(options)
        self._is_conditioned = options.is_conditioned
        self._inputs: ConditionedInputs | None = None
        self._asked: dict[str, Any] = {}
        """`NewRequestData` by request, until it ends; a preempted one comes again."""
        self._generators: dict[str, torch.Generator] = {}
        """Of conditioned requests with a seed."""
        self._codes: torch.Tensor | None = None
        super().__init__(vllm_config, device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self._capture is not None and self._capture.aux_layers:
            record_layers(self.model, self._capture.aux_layers)
            self.use_aux_hidden_state_outputs = True
        if self._is_conditioned:
            self._inputs = ConditionedInputs(self.get_model(), self.dtype, self.device)
            self.model_state = ConditionedState(
                self.vllm_config, self.model, self.encoder_cache, self.device, inputs=self._inputs
            )

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        super().reload_weights(*args, **kwargs)
        if self._inputs is not None:
            self._inputs.take_weights()

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        self._split_attention_in_graphs_alone()
        if self._capture is not None:
            (group,) = kv_cache_config.kv_cache_groups
            self._capture.allocate(
                kv_cache_config.num_blocks,
                group.kv_cache_spec.block_size,
                self.model_config.get_hidden_size(),
                self.dtype,
                self.device,
            )

    def _split_attention_in_graphs_alone(self) -> None:
        """Have FlashAttention choose by itself into how many parts it splits a prompt's work.

        vLLM gives it room for the most parts in every step that is no longer than the longest
        graph, since graphs need that. Where graphs of prompts leave attention out, only steps of
        decoding do: for others the partial sums are many times what is computed.
        """
        mode = self.compilation_config.cudagraph_mode
        if mode.mixed_mode() == CUDAGraphMode.FULL:
            return
        longest = self.max_num_reqs * self.decode_query_len
        for group in (group for groups in self.attn_groups for group in groups):
            for builder in group.metadata_builders:
                size = getattr(builder, "max_cudagraph_size", None)
                if size is not None:
                    builder.max_cudagraph_size = min(size, longest)

    def kv_share(self, available_bytes: int) -> int:
        """What of this memory the KV cache may take, so that the kept rows fit beside it."""
        if self._capture is None:
            return available_bytes
        return self._capture.share_of_kv(
            available_bytes,
            self.get_kv_cache_spec().values(),
            self.model_config.get_hidden_size(),
            self.dtype,
        )

    def capture_model(self, *, profile_only: bool = False) -> Any:
        # vLLM compiles what its graphs need and the longest step. Kernels that are chosen by the
        # number of tokens would be compiled by the first prompts of each length: seconds each.
        if not profile_only:
            recorded = max(self.compilation_config.cudagraph_capture_sizes or [1])
            for num_tokens in prompt_sizes(recorded, self.max_num_tokens):
                self._dummy_run(num_tokens, skip_eplb=True)
        taken = super().capture_model(profile_only=profile_only)
        if self._inputs is not None and not profile_only:
            with torch.inference_mode():
                self.get_model().warm_up(self.max_num_reqs)
                self._warm_sampler_up()
        return taken

    def _warm_sampler_up(self) -> None:
        """Compile the sampler's kernels for what is asked of a talker, or its first requests wait.

        A kernel differs for one row, for multiples of sixteen and for other numbers.
        """
        for params in (_SAMPLED, _NUCLEUS):
            for num_rows in (1, 2, 16):
                if num_rows > self.max_num_reqs:
                    break
                for row in range(num_rows):
                    self.sampler.add_request(row, params)
                self.sampler.apply_staged_writes()
                batch = InputBatch.make_dummy(num_rows, num_rows, self.input_buffers)
                logits = torch.zeros(num_rows, self.vocab_size, device=self.device)
                self.sampler(logits.to(self.dtype), batch)

    def finish_requests(self, scheduler_output: Any) -> None:
        # Those alone that are over: a preempted request keeps its rows and its random numbers.
        finished = scheduler_output.finished_req_ids
        if self._sent is not None:
            self._sent.finish(finished)
        if self._inputs is not None:
            self._inputs.finish(finished)
        for request_id in finished:
            self._asked.pop(request_id, None)
            self._generators.pop(request_id, None)
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: Any) -> None:
        if self._inputs is not None:
            self._inputs.update(updates_of(scheduler_output))
        for new in scheduler_output.scheduled_new_reqs:
            self._note(new)
        super().add_requests(scheduler_output)

    def _note(self, new: Any) -> None:
        self._asked[new.req_id] = new
        params = new.sampling_params
        if self._sent is not None:
            self._sent.begin(new.req_id, params)
        if self._inputs is None or params is None:
            return
        # This sampler keeps what each request has written on the device: it may have its penalty.
        params.repetition_penalty = (params.extra_args or {}).get(
            REPETITION_KEY, params.repetition_penalty
        )
        if params.seed is not None and new.req_id not in self._generators:
            self._generators[new.req_id] = torch.Generator(self.device).manual_seed(params.seed)

    def sample_tokens(self, grammar_output: Any) -> Any:
        step = self.execute_model_state
        if step is None or step.hidden_states is None:  # of another rank of the pipeline
            return super().sample_tokens(grammar_output)
        slots: torch.Tensor | None = None
        if self._capture is not None:
            slots = next(iter(step.slot_mappings_by_layer.values()))[: step.input_batch.num_tokens]
            self._capture.keep(step.hidden_states, step.aux_hidden_states, slots)
        output = super().sample_tokens(grammar_output)
        pending = PendingStep()
        if self._codes is not None:
            pending.codes = CodesOnTheWay(self._codes.to("cpu", non_blocking=True))
            pending.codes.rows = np.flatnonzero(has_sampled(step.input_batch)).tolist()
            self._codes = None
        if self._capture and self._sent and slots is not None and not self._sent.is_idle:
            due = self._sent.due(scheduled(step.input_batch), self._read_prompt)
            found = self._capture.read(
                self._slots(due, step.input_batch, slots), [each.spans for each in due]
            )
            for each, captured in zip(due, found, strict=True):
                pending.captured[each.row] = [*each.payloads, *captured]
        return with_payloads(output, pending)

    def _read_prompt(self, request_id: str) -> ReadPrompt:
        new = self._asked[request_id]

        def positions() -> torch.Tensor | None:
            if getattr(self.model_state, "rope_state", None) is None:
                return None
            found: torch.Tensor = self.model.get_mrope_input_positions(
                new.prompt_token_ids, new.mm_features
            )[0]
            return found

        return ReadPrompt(len(new.prompt_token_ids), new.mm_features, positions)

    def _slots(
        self, due: Sequence[DueRows], batch: InputBatch, of_step: torch.Tensor
    ) -> torch.Tensor:
        """Where the rows that are due lie, on the device."""
        if not due:
            return of_step[:0]
        if all(each.is_of_this_step for each in due):
            if sum(each.part.count for each in due) == batch.num_tokens:
                return of_step
            starts = batch.query_start_loc_np
            tokens = [np.arange(starts[each.row], starts[each.row + 1]) for each in due]
            return of_step.index_select(0, on_device(np.concatenate(tokens), self.device))
        assert self._capture is not None, "only asked where rows are kept"
        size = self._capture.block_size
        positions = [positions_of(each.spans) for each in due]
        rows = [
            np.full(len(of_one), batch.idx_mapping_np[each.row])
            for each, of_one in zip(due, positions, strict=True)
        ]
        at = np.concatenate(positions)
        index = on_device(np.stack([np.concatenate(rows), at // size, at % size]), self.device)
        table = self.block_tables.block_tables[0].gpu
        return table[index[0], index[1]].long() * size + index[2]

    def sample(self, hidden_states: torch.Tensor, input_batch: InputBatch, *args: Any) -> Any:
        result = super().sample(hidden_states, input_batch, *args)
        if self._inputs is not None:
            hidden = hidden_states[input_batch.logits_indices]
            self._run_after_sampling(
                self._inputs, hidden, input_batch, result[0].sampled_token_ids[:, 0]
            )
        return result

    def _run_after_sampling(
        self,
        inputs: ConditionedInputs,
        hidden: torch.Tensor,
        batch: InputBatch,
        token_ids: torch.Tensor,
    ) -> None:
        """What the model makes of the sampled tokens, and where it will be fed."""
        sampled = has_sampled(batch)
        self._codes, base = self.get_model().after_sampling(
            SampledBatch(
                hidden,
                token_ids,
                tuple(self._asked[one].sampling_params.temperature == 0 for one in batch.req_ids),
                tuple(self._generators.get(one) for one in batch.req_ids),
            )
        )
        inputs.keep(
            base,
            [
                _next_place(part) if sampled[row] else None
                for row, part in enumerate(scheduled(batch))
            ],
        )


def _next_place(part: Scheduled) -> tuple[str, int]:
    return part.request_id, part.first + part.count


def has_sampled(batch: InputBatch) -> np.ndarray[Any, Any]:
    """Of each row whether all that was to be read before its next token has been read."""
    computed: np.ndarray[Any, Any] = batch.num_computed_tokens_np + batch.num_scheduled_tokens
    return computed >= batch.prefill_len_np


def prompt_sizes(above: int, limit: int) -> list[int]:
    """Numbers of tokens of a step to try before the first request.

    Two for each doubling; and one token more, since kernels differ for multiples of sixteen.
    """
    sizes = [size * step for step in (2, 3) for size in (1 << k for k in range(limit.bit_length()))]
    chosen = {size for size in sizes if above < size < limit}
    return sorted(chosen | {size + 1 for size in chosen})
