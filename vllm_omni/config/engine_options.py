"""vLLM's engine arguments as options of AUTOREGRESSIVE stages: names, types, and who they are for.

vLLM is imported on first use only; a deploy config without engine options never loads it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Final

from vllm_omni.config.diffusion_options import diffusion_option_types
from vllm_omni.config.pipeline import PipelineConfig, StageConfig, StageKind, Task

ALIASES: Final[Mapping[str, str]] = {
    "max_num_seqs": "max_batch_size",
    "gpu_memory_utilization": "memory_fraction",
}
"""Engine arguments that are a stage's own field: one fact has one place."""

REFUSED: Final[Mapping[str, str]] = {
    "model": "the model folder decides it",
    "model_weights": "the model folder decides it",
    "device_ids": "set stages.NAME.devices",
    "distributed_executor_backend": "each replica is one process per rank, chosen by its stage",
    "worker_cls": "it is decided by the stage's kind",
    "scheduler_cls": "it is decided by the stage's kind",
    "mm_processor_cache_gb": "a cache of media between processes does not survive a replica",
    "mm_processor_cache_type": "a cache of media between processes does not survive a replica",
    "tokens_only": "stages are fed by the orchestrator",
    "shutdown_timeout": "set limits.drain_timeout_s",
    "data_parallel_size": "set stages.NAME.num_replicas",
    "data_parallel_rank": "set stages.NAME.num_replicas",
    "data_parallel_start_rank": "set stages.NAME.num_replicas",
    "data_parallel_size_local": "set stages.NAME.num_replicas",
    "data_parallel_address": "replicas run on this host",
    "data_parallel_rpc_port": "replicas run on this host",
    "data_parallel_hybrid_lb": "the orchestrator balances replicas",
    "data_parallel_external_lb": "the orchestrator balances replicas",
    "data_parallel_multi_port_external_lb": "the orchestrator balances replicas",
    "data_parallel_backend": "set stages.NAME.num_replicas",
    "nnodes": "replicas run on this host",
    "node_rank": "replicas run on this host",
    "master_addr": "replicas run on this host",
    "master_port": "replicas run on this host",
}
"""Engine arguments that cannot work here, and what to do instead. Families may still set them."""

PROMPT_STAGE_OPTIONS: Final = frozenset(
    {
        "allowed_local_media_path",
        "allowed_media_domains",
        "default_mm_loras",
        "enable_lora",
        "generation_config",
        "hf_config_path",
        "hf_overrides",
        "limit_mm_per_prompt",
        "lora_dtype",
        "lora_target_modules",
        "max_cpu_loras",
        "max_lora_rank",
        "max_loras",
        "max_logprobs",
        "max_model_len",
        "model_class_overrides",
        "override_generation_config",
        "quantization",
        "quantization_config",
        "reasoning_config",
        "reasoning_parser",
        "reasoning_parser_plugin",
        "served_model_name",
        "spec_method",
        "spec_model",
        "spec_tokens",
        "speculative_config",
        "structured_outputs_config",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
    }
)
"""Options that describe one checkpoint. Given for the whole server they mean the stage that reads
the prompt; every other engine option given so means all AUTOREGRESSIVE stages, and the others that
have it too."""


@functools.cache
def engine_argument_types() -> Mapping[str, object]:
    """Name and type of every public engine argument of the installed vLLM."""
    from vllm.engine.arg_utils import EngineArgs

    return {
        field.name: object if isinstance(field.type, str) else field.type
        for field in dataclasses.fields(EngineArgs)
        if not field.name.startswith("_")
    }


@functools.cache
def engine_argument_defaults() -> Mapping[str, object]:
    """What vLLM takes for arguments that nobody set."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs()
    return {name: getattr(args, name) for name in engine_argument_types()}


def option_types(stage: StageConfig) -> Mapping[str, object]:
    """The engine options a stage takes. A one-shot stage takes what its family declares."""
    if stage.kind is StageKind.AUTOREGRESSIVE:
        return engine_argument_types()
    if stage.kind is StageKind.DIFFUSION:
        return diffusion_option_types()
    return {
        name: object if default is None else type(default)
        for name, default in stage.engine_defaults.items()
    }


def stages_meant_by(name: str, pipeline: PipelineConfig) -> tuple[str, ...]:
    """The stages that an option given for the whole server is for."""
    names = tuple(stage.name for stage in pipeline.stages if _takes_server_option(stage, name))
    if name not in PROMPT_STAGE_OPTIONS:
        return names
    prompt_stage = pipeline.entries.get(Task.CHAT)
    return tuple(stage for stage in names if stage == prompt_stage)


def _takes_server_option(stage: StageConfig, name: str) -> bool:
    return stage.kind is StageKind.AUTOREGRESSIVE or name in option_types(stage)


def normalized(name: str, value: object) -> object:
    """vLLM's own spellings that its annotations do not show."""
    if name == "max_model_len" and value == "auto":
        return -1
    if name == "dtype" and type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    return value
