"""Which devices, threads and share of memory each replica gets; checked before anything loads."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from vllm_omni.config.deploy import ResolvedStage, StageDeploy
from vllm_omni.config.pipeline import StageKind
from vllm_omni.errors import PlacementError
from vllm_omni.platforms import Platform

DEFAULT_BUDGET: Final[Mapping[str, float]] = {"cpu": 0.5, "cuda": 0.9}
"""Share of a device that stages with no explicit fraction divide among themselves."""
_WEIGHTS: Final = {StageKind.AUTOREGRESSIVE: 4, StageKind.DIFFUSION: 4, StageKind.ONE_SHOT: 1}
"""How they divide it: a KV cache and a denoiser take more than a vocoder."""
_PARALLEL_SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size")
KV_BYTES: Final = "kv_cache_memory_bytes"
_UTILIZATION: Final = "gpu_memory_utilization"
_MAX_SHOWN: Final = 4
"""Replicas of a stage that a sum shows one by one."""
_LEAST_SHARE: Final = 0.01
_ROUNDING: Final = 1e-6

Provenance = dict[str, str]


def split_devices(devices: str) -> tuple[str, ...]:
    """`cuda:0,1` as `("cuda:0", "cuda:1")`: the devices of one replica."""
    kind, _, numbers = devices.partition(":")
    if not numbers:
        return tuple(name.strip() for name in devices.split(","))
    return tuple(
        f"{kind}:{number.strip().removeprefix(kind + ':')}" for number in numbers.split(",")
    )


def place(
    stages: Sequence[ResolvedStage], platform: Platform
) -> tuple[tuple[ResolvedStage, ...], Provenance]:
    """Decide what the operator left open; returns the stages and who decided.

    Raises:
        PlacementError: a device does not exist, or a device's memory is given away twice.
    """
    memory = {device.name: device.memory_bytes for device in platform.devices()}
    placed = _with_devices(stages, platform)
    for stage in placed:
        _check_devices(stage, memory, platform.device_type)
    num_replicas = sum(stage.deploy.num_replicas for stage in placed)
    threads = platform.default_num_threads(num_replicas)
    fractions = _fractions(placed, memory, platform.device_type)
    provenance: Provenance = {}
    done = []
    for before, stage in zip(stages, placed, strict=True):
        deploy = _decided(stage, threads, fractions.get(stage.config.name))
        done.append(dataclasses.replace(stage, deploy=deploy))
        provenance |= _who_decided(before, deploy, platform.device_type)
    return tuple(done), provenance


def world_size(stage: ResolvedStage) -> int:
    """Ranks of one replica, as its engine options ask for."""
    size = 1
    for name in _PARALLEL_SIZES:
        value = stage.deploy.engine_args.get(name, 1)
        assert isinstance(value, int), f"{name} is checked when it is read"
        size *= value
    return size


def _with_devices(stages: Sequence[ResolvedStage], platform: Platform) -> tuple[ResolvedStage, ...]:
    """Every stage with one device list per replica."""
    placed, replica = [], 0
    for stage in stages:
        deploy, count = stage.deploy, stage.deploy.num_replicas
        if len(deploy.devices) not in (0, 1, count):
            raise PlacementError(
                f"stages.{stage.config.name}.devices has {len(deploy.devices)} entries for "
                f"{count} replicas: give one for all or one for each"
            )
        if deploy.devices:
            devices = deploy.devices * (1 if len(deploy.devices) == count else count)
        else:
            ranks = world_size(stage)
            devices = tuple(
                _joined(platform.default_devices(replica + i, ranks)) for i in range(count)
            )
        replica += count
        placed.append(
            dataclasses.replace(stage, deploy=dataclasses.replace(deploy, devices=devices))
        )
    return tuple(placed)


def _joined(devices: tuple[str, ...]) -> str:
    kind, _, number = devices[0].partition(":")
    if len(devices) == 1 or not number:
        return ",".join(devices)
    return f"{kind}:{','.join(name.partition(':')[2] for name in devices)}"


def _check_devices(stage: ResolvedStage, memory: Mapping[str, int], device_type: str) -> None:
    name, key = stage.config.name, f"stages.{stage.config.name}.devices"
    for devices in map(split_devices, stage.deploy.devices):
        for device in devices:
            if device not in memory and device != "cpu":
                raise PlacementError(f"{key}: no device {device!r} here; found {', '.join(memory)}")
        is_ar = stage.config.kind is StageKind.AUTOREGRESSIVE
        if is_ar and any(device.partition(":")[0] != device_type for device in devices):
            raise PlacementError(
                f"{key}: this build of vLLM runs on {device_type}, so stage {name!r} cannot run "
                f"on {', '.join(devices)}"
            )
        if len(set(devices)) != len(devices) and device_type != "cpu":
            raise PlacementError(f"{key}: a device repeats in {', '.join(devices)}")
        if stage.config.kind is StageKind.ONE_SHOT and len(devices) > 1:
            raise PlacementError(f"{key}: a replica of {name!r} has one device, not {len(devices)}")
        if is_ar and len(devices) != world_size(stage):
            raise PlacementError(
                f"{key}: {len(devices)} devices for a replica of {world_size(stage)} ranks "
                f"({' x '.join(_PARALLEL_SIZES)})"
            )


def _fractions(
    stages: Sequence[ResolvedStage], memory: Mapping[str, int], device_type: str
) -> dict[str, float]:
    """The memory fraction of every stage that has or needs one; PlacementError beyond 1."""
    claims: dict[str, list[tuple[str, float]]] = defaultdict(list)
    open_weights: dict[str, int] = defaultdict(int)
    known: dict[str, float] = {}
    for stage in stages:
        fraction = stage.deploy.memory_fraction
        for device in _devices_of(stage):
            if fraction is None and _needs_fraction(stage, device):
                open_weights[device] += _WEIGHTS[stage.config.kind]
                continue
            claim = fraction if fraction is not None else _fixed_share(stage, memory.get(device))
            claims[device].append((stage.config.name, claim))
        if fraction is not None:
            known[stage.config.name] = fraction
    for device, listed in claims.items():
        _check_sum(device, listed, DEFAULT_BUDGET[device_type] if open_weights[device] else None)
    for stage in stages:
        devices = _devices_of(stage)
        if stage.config.name not in known and any(_needs_fraction(stage, d) for d in devices):
            shares = [
                (DEFAULT_BUDGET[device_type] - sum(share for _, share in claims[d]))
                * _WEIGHTS[stage.config.kind]
                / open_weights[d]
                for d in devices
            ]
            known[stage.config.name] = int(min(shares) * 1000) / 1000
    return known


def _devices_of(stage: ResolvedStage) -> list[str]:
    """Every device the stage's replicas use, as often as they use it."""
    return [device for listed in stage.deploy.devices for device in split_devices(listed)]


def _needs_fraction(stage: ResolvedStage, device: str) -> bool:
    """Whether the stage would take what it likes. vLLM does on any device, ours only on a GPU."""
    if stage.config.kind is StageKind.AUTOREGRESSIVE:
        return stage.deploy.engine_args.get(KV_BYTES) is None
    return device != "cpu"


def _fixed_share(stage: ResolvedStage, memory_bytes: int | None) -> float:
    """What a stage with a KV cache of fixed size takes of a device, by that cache alone."""
    kv_bytes = stage.deploy.engine_args.get(KV_BYTES)
    return kv_bytes / memory_bytes if isinstance(kv_bytes, int) and memory_bytes else 0.0


def _check_sum(device: str, claims: list[tuple[str, float]], budget: float | None) -> None:
    """`budget` is what the stages with a fixed share must leave something of; None: no others."""
    total = sum(share for _, share in claims)
    if total > 1 + _ROUNDING:
        fault = "more than 1"
    elif budget is not None and total > budget - _LEAST_SHARE:
        fault = "which leaves too little for the other stages on it"
    else:
        return
    counted = Counter((name, share) for name, share in claims if share)
    shown = " + ".join(
        " + ".join([f"{share:.3g} ({name})"] * num)
        if num <= _MAX_SHOWN
        else f"{num} times {share:.3g} ({name})"
        for (name, share), num in counted.items()
    )
    raise PlacementError(
        f"memory fractions on {device}: {shown} = {total:.3g}, {fault}; "
        "lower stages.NAME.memory_fraction or use other devices"
    )


def _decided(stage: ResolvedStage, threads: int, fraction: float | None) -> StageDeploy:
    deploy, engine_args = stage.deploy, dict(stage.deploy.engine_args)
    if stage.config.kind is StageKind.AUTOREGRESSIVE and fraction is not None:
        engine_args[_UTILIZATION] = fraction
    return dataclasses.replace(
        deploy,
        num_threads=threads if deploy.num_threads is None else deploy.num_threads,
        memory_fraction=fraction,
        engine_args=engine_args,
    )


def _who_decided(before: ResolvedStage, after: StageDeploy, device_type: str) -> Provenance:
    """Names for what this module filled in."""
    key = f"stages.{before.config.name}"
    deploy, source = before.deploy, f"platform ({device_type})"
    found = {
        f"{key}.devices": after.devices != deploy.devices,
        f"{key}.num_threads": deploy.num_threads is None,
        f"{key}.memory_fraction": deploy.memory_fraction is None
        and after.memory_fraction is not None,
    }
    provenance = {name: source for name, is_ours in found.items() if is_ours}
    if _UTILIZATION in after.engine_args:
        provenance[f"{key}.engine_args.{_UTILIZATION}"] = f"{key}.memory_fraction"
    return provenance
