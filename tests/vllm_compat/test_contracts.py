"""What we rely on in vLLM and cannot import: a failure here names what a new release changed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models.interfaces import SupportsTranscription
from vllm.model_executor.models.whisper import WhisperForConditionalGeneration
from vllm.renderers import BaseRenderer
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.engine import core as core_module
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, MPClient
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.utils import EngineHandshakeMetadata, EngineZmqListeners
from vllm.v1.executor.abstract import Executor

from vllm_omni.core.stage_core import StageCore
from vllm_omni.vllm_compat import engine_core_class
from vllm_omni.worker.executor import STAGE_EXECUTOR, StageExecutor


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_a_request_has_the_fields_we_copy_and_set() -> None:
    fields = EngineCoreRequest.__struct_fields__

    assert fields[:5] == (
        "request_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
    )
    assert {
        "prompt_embeds",
        "external_req_id",
        "reasoning_ended",
        "reasoning_parser_kwargs",
        "client_index",
    } <= set(fields)


def test_outputs_have_the_fields_we_read() -> None:
    assert EngineCoreOutput.__struct_fields__[:2] == ("request_id", "new_token_ids")
    assert "finish_reason" in EngineCoreOutput.__struct_fields__
    assert {"outputs", "scheduler_stats", "timestamp", "weight_version"} <= set(
        EngineCoreOutputs.__struct_fields__
    )
    assert [str(reason) for reason in FinishReason] == [
        "stop",
        "length",
        "abort",
        "error",
        "repetition",
    ]


def test_the_engine_core_has_the_methods_we_override() -> None:
    assert parameters(EngineCoreProc.__init__) == [
        "vllm_config",
        "local_client",
        "handshake_address",
        "executor_class",
        "log_stats",
        "client_handshake_address",
        "tensor_queue",
        "engine_index",
    ]
    assert parameters(EngineCore.add_request) == ["request", "request_wave"]
    assert parameters(EngineCore.abort_requests) == ["request_ids"]
    assert parameters(EngineCore.step) == parameters(EngineCore.step_with_batch_queue) == []
    assert parameters(EngineCoreProc._handle_request_preproc_error) == ["request"]
    assert parameters(EngineCoreProc._reject_add_in_shutdown) == ["request"]
    assert parameters(EngineCoreProc._send_finish_outputs_to_client) == [
        "req_ids",
        "client_index",
        "finish_reason",
    ]
    assert parameters(EngineCoreProc.run_busy_loop) == []


def test_aborts_of_requests_that_end_outside_a_step_pass_the_method_we_override() -> None:
    for name in ("_send_abort_outputs_to_client", "_send_error_outputs_to_client"):
        source = inspect.getsource(getattr(EngineCoreProc, name))
        assert "_send_finish_outputs_to_client" in source, name
    assert "abort_requests" in inspect.getsource(EngineCore._process_aborts_queue)


def test_run_engine_core_builds_the_class_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compat change `engine_core_class` works, and is still needed."""
    monkeypatch.setattr(core_module, "EngineCoreProc", EngineCoreProc)
    engine_core_class.install(StageCore)

    assert core_module.EngineCoreProc is StageCore
    source = inspect.getsource(EngineCoreProc.run_engine_core)
    assert "EngineCoreProc(*args, engine_index=dp_rank, **kwargs)" in source
    assert isinstance(inspect.getattr_static(EngineCoreProc, "run_engine_core"), staticmethod)


def test_the_client_adopts_listeners_and_has_the_parts_we_reach_for() -> None:
    source = inspect.getsource(MPClient.__init__)
    for name in ("input_address", "output_address", "input_listener", "output_listener"):
        assert f'"{name}"' in source
    assert "outputs_queue" in inspect.getsource(AsyncMPClient.__init__)
    assert "utility_results" in inspect.getsource(MPClient.__init__)
    assert parameters(AsyncMPClient._send_input) == ["request_type", "request", "engine"]
    assert EngineCoreRequestType.UTILITY.value == b"\x03"
    assert parameters(EngineZmqListeners) == ["inputs", "outputs"]
    assert parameters(EngineHandshakeMetadata) == ["addresses", "parallel_config"]


def test_processors_take_what_we_give_them() -> None:
    assert parameters(OutputProcessor.process_outputs) == [
        "engine_core_outputs",
        "engine_core_timestamp",
        "iteration_stats",
        "weight_version",
    ]
    assert parameters(OutputProcessor.add_request)[:4] == [
        "request",
        "prompt",
        "parent_req",
        "request_index",
    ]
    assert {
        "arrival_time",
        "lora_request",
        "tokenization_kwargs",
        "trace_headers",
        "priority",
        "session_id",
        "kv_hints",
    } <= set(parameters(InputProcessor.process_inputs))
    assert "api_process_rank" in inspect.getsource(BaseRenderer._process_multimodal)


def test_the_executor_is_taken_by_its_path_and_left_alone() -> None:
    config = ParallelConfig(distributed_executor_backend=STAGE_EXECUTOR)

    assert config.distributed_executor_backend == STAGE_EXECUTOR
    assert issubclass(StageExecutor, Executor)
    assert "resolve_obj_by_qualname" in inspect.getsource(Executor.get_class)


def test_engine_arguments_have_the_names_we_set() -> None:
    names = set(inspect.signature(AsyncEngineArgs).parameters)

    assert {
        "model",
        "max_num_seqs",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "distributed_executor_backend",
        "mm_processor_cache_gb",
        "enforce_eager",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "trust_remote_code",
    } <= names


def test_speech_models_have_the_interface_that_prompts_come_from() -> None:
    for model_class in (SupportsTranscription, WhisperForConditionalGeneration):
        assert parameters(model_class.get_generation_prompt) == ["stt_params"]
        assert parameters(model_class.get_speech_to_text_config) == ["model_config", "task_type"]
        assert parameters(model_class.validate_language) == ["language"]
    assert WhisperForConditionalGeneration.supports_transcription_only
