"""From a resolved config to running replicas and preparers: which engine runs which kind.

Imports an engine only when a stage needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from vllm_omni.config.deploy import ResolvedConfig, ResolvedStage
from vllm_omni.config.pipeline import Modality, StageKind
from vllm_omni.config.placement import split_devices
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.engine.speech_preparer import SpeechPreparer
from vllm_omni.engine.stage_client import StageClient, StagePreparer
from vllm_omni.errors import ConfigError
from vllm_omni.platforms import platform_of


def replica_specs(config: ResolvedConfig) -> list[ReplicaSpec]:
    """One spec for every replica of every stage, in the order of their ids."""
    return [
        _replica_spec(config, stage, replica_id)
        for stage in config.stages
        for replica_id in range(stage.deploy.num_replicas)
    ]


def _replica_spec(config: ResolvedConfig, stage: ResolvedStage, replica_id: int) -> ReplicaSpec:
    name, deploy = stage.config.name, stage.deploy
    assert len(deploy.devices) == deploy.num_replicas, "placement gives every replica its devices"
    assert deploy.num_threads is not None, "placement gives every replica its threads"
    streams = [edge for edge in config.pipeline.edges if edge.streams]
    devices = split_devices(deploy.devices[replica_id])
    return ReplicaSpec(
        stage=name,
        stage_id=stage.stage_id,
        replica_id=replica_id,
        kind=stage.config.kind,
        model_dir=stage.model_dir,
        model_class=stage.config.model_class,
        devices=devices,
        num_threads=deploy.num_threads,
        max_batch_size=deploy.max_batch_size,
        start_timeout_s=deploy.start_timeout_s,
        engine_args=deploy.engine_args,
        env=platform_of(devices[0]).yielding_env() if deploy.yields_device else {},
        has_sources=any(edge.target == name for edge in streams),
        bridges=tuple(edge.bridge for edge in streams if edge.target == name),
        has_targets=any(edge.source == name for edge in streams),
        capture=next((e.capture for e in streams if e.source == name and e.capture), None),
        hf_config=stage.config.hf_config,
        capabilities=stage.config.capabilities,
        memory_fraction=deploy.memory_fraction,
    )


async def start_replica(spec: ReplicaSpec) -> StageClient:
    """Start one replica and return its client once a real request went through it.

    Call from the loop the client will live in, in a thread that lives as long as the replica.

    Raises:
        ConfigError: the stage's engine cannot be configured so.
        StageStartError: the replica did not become ready; its own error on one line.
    """
    match spec.kind:
        case StageKind.AUTOREGRESSIVE:
            from vllm_omni.engine.ar_launch import start_ar_replica

            return await start_ar_replica(spec)
        case StageKind.ONE_SHOT:
            from vllm_omni.engine.one_shot_client import OneShotClient

            return await OneShotClient.start(spec)
        case StageKind.DIFFUSION:
            from vllm_omni.engine.diffusion_client import DiffusionClient

            return await DiffusionClient.start(spec)


def make_preparer(stage: ResolvedStage, config: ResolvedConfig) -> StagePreparer:
    """The preparer of one stage, shared by its replicas. Blocks while it loads a tokenizer.

    Raises:
        ConfigError: the stage's engine cannot be configured so.
    """
    if stage.config.kind is StageKind.AUTOREGRESSIVE:
        from vllm_omni.engine.ar_config import build_vllm_config
        from vllm_omni.engine.ar_preparer import ArPreparer

        vllm_config, _ = build_vllm_config(_replica_spec(config, stage, 0))
        return ArPreparer(stage.config.name, vllm_config)
    if stage.config.kind is StageKind.DIFFUSION:
        from vllm_omni.diffusion.checks import load_capabilities
        from vllm_omni.engine.diffusion_preparer import DiffusionPreparer

        capabilities = load_capabilities(
            stage.config.capabilities, stage.model_dir, stage.config.name
        )
        adapters = stage.deploy.engine_args.get("lora_modules", {})
        assert isinstance(adapters, Mapping), "it is checked when it is read"
        return DiffusionPreparer(stage.config.name, capabilities, adapters)
    if stage.config.kind is StageKind.ONE_SHOT and stage.config.emits is Modality.AUDIO:
        return SpeechPreparer(stage.config.name, voices_of(config), config.limits.max_speech_chars)
    raise ConfigError(f"stage {stage.config.name!r}: {stage.config.kind} stages take no requests")


def voices_of(config: ResolvedConfig) -> Sequence[str]:
    """Names of the voices that the checkpoint has; empty when the pipeline does not say."""
    if config.pipeline.voices is None:
        return ()
    module, _, name = config.pipeline.voices.partition(":")
    names: Sequence[str] = getattr(importlib.import_module(module), name)(config.model_dir)
    return names
