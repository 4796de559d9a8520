"""What our runner, workers and scheduler hold on to inside vLLM; a failure names what changed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import vllm.v1.worker.cpu_worker as vllm_cpu_worker
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequestType
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

from vllm_omni.worker.cpu_worker import StageCPURunner
from vllm_omni.worker.stage_runner import StageRunnerMixin


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("load_model", []),
        ("reload_weights", ["weights_iterator", "weights_path"]),
        ("initialize_kv_cache", ["kv_cache_config"]),
        ("_update_states", ["scheduler_output"]),
        ("_init_mrope_positions", ["req_state"]),
        ("_preprocess", ["scheduler_output"]),
        ("_sample", ["logits", "spec_decode_metadata"]),
        ("sample_tokens", ["grammar_output"]),
    ],
)
def test_the_runner_has_the_hooks_that_we_wrap(name: str, first: list[str]) -> None:
    assert parameters(getattr(GPUModelRunner, name))[: len(first)] == first
    assert getattr(CPUModelRunner, name) is not None
    assert name in vars(StageRunnerMixin)


def test_the_runner_looks_up_embeddings_where_its_buffer_says_so() -> None:
    source = inspect.getsource(GPUModelRunner._preprocess)
    assert "is_token_ids = self.is_token_ids.np[:num_scheduled_tokens]" in source


def test_our_hooks_come_first_on_the_cpu() -> None:
    assert StageCPURunner.__mro__.index(StageRunnerMixin) < StageCPURunner.__mro__.index(
        CPUModelRunner
    )


def test_experts_are_packed_for_the_cpu_only_with_a_new_kernel() -> None:
    """Remove `StageCPURunner.reload_weights` when this fails: a reload packs them then."""
    source = inspect.getsource(UnquantizedFusedMoEMethod._setup_kernel)
    only_first = source[source.index("if not is_weight_update:") :]
    assert "fused_experts.process_weights_after_loading(layer)" in only_first


def test_the_second_result_of_preprocessing_is_the_embeddings() -> None:
    source = inspect.getsource(GPUModelRunner._preprocess)
    returned = source[source.rindex("return (") :].replace(" ", "").split("\n")
    assert returned[1:3] == ["input_ids,", "inputs_embeds,"]


def test_the_state_between_forward_and_sampling_has_what_we_read() -> None:
    assert {
        "scheduler_output",
        "hidden_states",
        "sample_hidden_states",
        "aux_hidden_states",
        "slot_mappings",
    } <= set(ExecuteModelState._fields)


def test_a_requests_state_in_the_runner_has_what_we_read() -> None:
    fields = set(inspect.signature(CachedRequestState).parameters)
    assert {
        "req_id",
        "sampling_params",
        "num_computed_tokens",
        "block_ids",
        "mm_features",
        "mrope_positions",
        "mrope_position_delta",
    } <= fields


def test_what_the_runner_adds_goes_through_the_scheduler_untouched() -> None:
    assert "pooler_output" in inspect.signature(ModelRunnerOutput).parameters
    assert "pooling_output" in EngineCoreOutput.__struct_fields__
    source = inspect.getsource(Scheduler.update_from_output)
    assert "pooler_outputs[req_index] if pooler_outputs else None" in source
    assert "pooling_output=pooler_output" in source


def test_the_scheduler_skips_who_is_not_eligible_and_asks_about_who_waits() -> None:
    request = Request("r", [1], _params(), None)
    assert request.next_decode_eligible_step == 0
    source = inspect.getsource(Scheduler.schedule)
    assert "self.current_step < request.next_decode_eligible_step" in source
    assert "self._handle_blocked_waiting_request(request)" in source
    assert parameters(AsyncScheduler._free_request) == ["request", "delay_free_blocks"]


def test_an_empty_message_wakes_the_core() -> None:
    assert EngineCoreRequestType.WAKEUP.value == b"\x05"


def test_the_cpu_worker_takes_its_runner_from_its_module() -> None:
    source = inspect.getsource(vllm_cpu_worker.CPUWorker.init_device)
    assert "self.model_runner = CPUModelRunner(" in source


def test_a_resumed_request_counts_what_it_wrote() -> None:
    request = Request("r", [1, 2], _params(), None)
    request.append_output_token_ids([3])
    assert (request.num_tokens, request.num_prompt_tokens) == (3, 2)


def _params() -> Any:
    from vllm.sampling_params import SamplingParams

    return SamplingParams(max_tokens=4)
