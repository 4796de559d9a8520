"""What our CUDA runner holds on to inside vLLM's second one; a failure names what changed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_runner import ExecuteModelState, GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import AttentionGroup

from vllm_omni.worker.conditioned_state import ConditionedState
from vllm_omni.worker.gpu_runner import StageGPURunner
from vllm_omni.worker.gpu_worker import StageGPUWorker


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("__init__", ["vllm_config", "device"]),
        ("load_model", []),
        ("reload_weights", ["weights_iterator", "weights_path"]),
        ("initialize_kv_cache", ["kv_cache_config"]),
        ("capture_model", ["profile_only"]),
        ("finish_requests", ["scheduler_output"]),
        ("add_requests", ["scheduler_output"]),
        ("sample", ["hidden_states", "input_batch", "grammar_output"]),
        ("sample_tokens", ["grammar_output"]),
    ],
)
def test_the_runner_has_the_hooks_that_we_wrap(name: str, first: list[str]) -> None:
    assert parameters(getattr(GPUModelRunner, name))[: len(first)] == first
    assert name in vars(StageGPURunner)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("add_request", ["req_index", "new_req_data"]),
        ("prepare_inputs_embeds", ["scheduled_encoder_inputs", "input_batch", "req_states"]),
    ],
)
def test_the_state_of_a_model_has_the_hooks_that_we_wrap(name: str, first: list[str]) -> None:
    assert parameters(getattr(DefaultModelState, name)) == first
    assert name in vars(ConditionedState)


def test_a_worker_asks_a_method_for_its_runner() -> None:
    assert "self._make_model_runner()" in inspect.getsource(Worker)
    assert "_make_model_runner" in vars(StageGPUWorker)


def test_requests_come_and_go_before_the_inputs_are_prepared() -> None:
    source = inspect.getsource(GPUModelRunner.execute_model)
    places = [
        source.index(call)
        for call in (
            "self.finish_requests(scheduler_output)",
            "self.add_requests(scheduler_output)",
            "self.prepare_inputs(",
            "self.model_state.prepare_inputs_embeds(",
        )
    ]
    assert places == sorted(places)


def test_a_preempted_request_comes_again_as_a_new_one() -> None:
    source = inspect.getsource(Scheduler.schedule)
    assert "scheduled_new_reqs.extend(scheduled_resumed_reqs)" in source
    assert "preempted_req_ids" in SchedulerOutput.__dataclass_fields__
    assert {"prefill_token_ids", "prompt_token_ids", "mm_features", "sampling_params"} <= set(
        NewRequestData.__dataclass_fields__
    )


def test_the_state_between_forward_and_sampling_has_what_we_read() -> None:
    assert {
        "input_batch",
        "hidden_states",
        "aux_hidden_states",
        "slot_mappings_by_layer",
    } <= set(ExecuteModelState._fields)
    assert {
        "req_ids",
        "idx_mapping_np",
        "num_computed_tokens_np",
        "num_scheduled_tokens",
        "num_tokens",
        "num_tokens_after_padding",
        "prefill_len_np",
        "query_start_loc_np",
        "logits_indices",
    } <= set(InputBatch.__dataclass_fields__)


def test_blocks_and_positions_of_a_request_lie_where_we_look() -> None:
    assert "self.block_tables: list[StagedWriteTensor]" in inspect.getsource(BlockTables.__init__)
    source = inspect.getsource(RopeState.init_prefill_positions)
    assert "self.prefill_delta.np[req_idx] = delta" in source
    assert "self.prefill_positions.stage_write(self.num_dims * req_idx + i, 0, pos)" in source


def test_the_sampler_can_be_called_before_the_first_request() -> None:
    assert parameters(Sampler.add_request) == ["req_idx", "sampling_params"]
    assert parameters(Sampler.__call__) == ["logits", "input_batch"]
    assert parameters(InputBatch.make_dummy)[:3] == ["num_reqs", "num_tokens", "input_buffers"]


def test_a_step_no_longer_than_the_longest_graph_has_room_for_the_most_splits() -> None:
    """Remove `_split_attention_in_graphs_alone` when this fails, if prompts are left alone then."""
    source = inspect.getsource(FlashAttentionMetadataBuilder)
    assert "self.max_cudagraph_size = self.compilation_config.max_cudagraph_capture_size" in source
    assert "and num_actual_tokens <= self.max_cudagraph_size" in source
    assert "metadata_builders" in AttentionGroup.__dataclass_fields__
