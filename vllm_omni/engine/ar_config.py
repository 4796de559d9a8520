"""One `VllmConfig` per autoregressive replica, and the environment its process needs.

Runs in the API process. Building a config makes vLLM write environment variables meant for the
processes that compute; they are handed to the child and taken back here.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from vllm_omni import envs
from vllm_omni.config.pipeline import Capture
from vllm_omni.core.stage_scheduler import STAGE_SCHEDULER
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.errors import ConfigError
from vllm_omni.platforms import platform_of
from vllm_omni.worker.executor import STAGE_EXECUTOR
from vllm_omni.worker.stage_options import CPU_WORKER, STAGE_WORKERS, StageOptions

CPU_KV_CACHE_BYTES: Final = 1 << 30
"""KV cache of a replica on CPU when nothing says otherwise; vLLM would take most of the host."""

_MEMORY_ARGS: Final = ("kv_cache_memory_bytes", "gpu_memory_utilization")
_ENVIRON_LOCK: Final = threading.Lock()


def engine_arguments(spec: ReplicaSpec) -> dict[str, Any]:
    """vLLM's engine arguments of one replica: what the spec implies, then what it names.

    Raises:
        ConfigError: an argument that vLLM does not have.
    """
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in spec.engine_args:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"stage {spec.stage!r}: vLLM has no engine argument {name!r}{hint}")
    world_size = len(spec.devices)
    pipeline_parallel_size = int(str(spec.engine_args.get("pipeline_parallel_size", 1)))
    arguments: dict[str, Any] = {
        "model": str(spec.model_dir),
        "max_num_seqs": spec.max_batch_size,
        "tensor_parallel_size": world_size // pipeline_parallel_size,
        "distributed_executor_backend": STAGE_EXECUTOR if world_size == 1 else "mp",
        # The sender's half of that cache would have to follow every replica and restart.
        "mm_processor_cache_gb": 0,
    }
    if spec.hf_config is not None:
        arguments["hf_overrides"] = _overrides(spec.hf_config)
    if spec.capture is not None or spec.is_conditioned:
        arguments |= _seam_arguments(spec)
    if spec.devices[0] == "cpu":
        arguments["enforce_eager"] = True
        arguments.setdefault("worker_cls", CPU_WORKER)
        if not any(name in spec.engine_args for name in _MEMORY_ARGS):
            arguments["kv_cache_memory_bytes"] = envs.cpu_kv_cache_bytes() or CPU_KV_CACHE_BYTES
    return arguments | dict(spec.engine_args)


def _seam_arguments(spec: ReplicaSpec) -> dict[str, Any]:
    """Our runner, and for a conditioned stage our scheduler."""
    options = StageOptions(
        capture_layers=_layers(spec, spec.capture) if spec.capture is not None else None,
        capture_scope=spec.capture.scope if spec.capture is not None else None,
        is_conditioned=spec.is_conditioned,
    )
    arguments: dict[str, Any] = {
        "worker_cls": STAGE_WORKERS[platform_of(spec.devices[0]).device_type],
        "additional_config": options.as_config(),
    }
    if spec.is_conditioned:
        arguments |= {
            "scheduler_cls": STAGE_SCHEDULER,
            # Has the runner hand embeddings to the forward, in a buffer that graphs replay.
            "enable_prompt_embeds": True,
            # Its inputs are not in the hash of a block.
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            # The checkpoint's sampling defaults are those of the stage that reads the prompt.
            "generation_config": "vllm",
        }
    return arguments


def _layers(spec: ReplicaSpec, capture: Capture) -> tuple[int, ...]:
    """The layers as numbers; names are looked up in the checkpoint's config.json."""
    layers = []
    for layer in capture.layers:
        if isinstance(layer, str):
            value: Any = json.loads((spec.model_dir / "config.json").read_text(encoding="utf-8"))
            for part in layer.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if not isinstance(value, int):
                raise ConfigError(f"stage {spec.stage!r}: config.json has no number {layer!r}")
            layer = value
        layers.append(layer)
    return tuple(layers)


def _overrides(name: str) -> Callable[..., Any]:
    """A family's function that makes a stage's config, by `module:function`."""
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def build_vllm_config(spec: ReplicaSpec) -> tuple[VllmConfig, dict[str, str]]:
    """The replica's config, and the variables that vLLM wants in its process. Blocks for a second.

    Raises:
        ConfigError: vLLM refuses the arguments or cannot read the checkpoint; one line.
    """
    arguments = engine_arguments(spec)
    with _contained_environment() as written:
        if "worker_cls" in arguments:
            # Ours extend vLLM's first one on the CPU, and its second one elsewhere.
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(spec.devices[0] != "cpu"))
        try:
            config = AsyncEngineArgs(**arguments).create_engine_config(
                UsageContext.OPENAI_API_SERVER
            )
        except (ValueError, TypeError, OSError, NotImplementedError) as error:
            text = " ".join(str(error).split())
            raise ConfigError(f"stage {spec.stage!r}: {text}") from error
    env = dict(written)
    if spec.devices[0] == "cpu" and config.model_config.enforce_eager:
        # Else vLLM's sampler compiles helpers with the C++ compiler when a request first asks for
        # logprobs: many seconds in which the core serves nobody.
        env["TORCHDYNAMO_DISABLE"] = "1"
    return config, env


@contextmanager
def _contained_environment() -> Iterator[Mapping[str, str]]:
    """Collect the variables that are set inside, and put this process's own back."""
    written: dict[str, str] = {}
    with _ENVIRON_LOCK:
        before = dict(os.environ)
        # It is read where settings are merged; vLLM would let it win over all of them.
        kv_space = os.environ.pop(envs.CPU_KV_CACHE, None)
        try:
            yield written
        finally:
            after = dict(os.environ)
            written.update({k: v for k, v in after.items() if before.get(k) != v})
            for name in written:
                if name in before:
                    os.environ[name] = before[name]
                else:
                    del os.environ[name]
            if kv_space is not None:
                os.environ[envs.CPU_KV_CACHE] = kv_space
