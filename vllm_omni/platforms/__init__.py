"""Devices and what a process must do for them: the only home of `torch.cuda` and friends.

vLLM decides which platform this is, so that both always agree. Importing this package is free;
the first question imports what it takes to answer it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from vllm_omni.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """One device as a deploy config names it."""

    name: str
    """`cpu`, `cuda:0`."""
    memory_bytes: int
    """All of it, in use or not."""


class Platform(Protocol):
    """One kind of device."""

    device_type: str
    """`cpu`, `cuda`."""

    def devices(self) -> tuple[Device, ...]:
        """Every device of this host, in the order of their numbers."""

    def child_env(self, devices: tuple[str, ...]) -> dict[str, str]:
        """Variables that confine a replica's process to its devices."""

    def yielding_env(self) -> dict[str, str]:
        """Variables by which a process lets others of its device go first, as far as it can."""

    def default_devices(self, replica: int, world_size: int) -> tuple[str, ...]:
        """Devices of the n-th replica of this host when the operator names none."""

    def default_num_threads(self, num_replicas: int) -> int:
        """CPU threads of one of `num_replicas` replicas that share this host."""

    def using(self, device: str) -> AbstractContextManager[object]:
        """Around what a thread computes on a device, so that it goes to that one."""

    def limit_memory(self, device: str, fraction: float) -> None:
        """Have this process's allocations through PyTorch fail beyond a share of the device's
        memory. Nothing where other processes need no such guard."""

    def fence(self, device: str) -> Callable[[], None]:
        """Mark what this process has put on a device so far; the answer waits for it."""

    def prepare_process(self) -> None:
        """Call in every process that computes, before its first forward. Repeatable."""


@functools.cache
def current_platform() -> Platform:
    """The platform of this installation: what vLLM was built for and finds on this host."""
    from vllm.platforms import current_platform as host

    if host.device_type == "cpu":
        from vllm_omni.platforms.cpu import CpuPlatform

        return CpuPlatform()
    if host.device_type == "cuda":
        from vllm_omni.platforms.cuda import CudaPlatform

        return CudaPlatform()
    raise ConfigError(f"platform {host.device_type!r} is not supported; known: cpu, cuda")


def platform_of(device: str) -> Platform:
    """The platform that a device name belongs to."""
    if device == "cpu":
        from vllm_omni.platforms.cpu import CpuPlatform

        return CpuPlatform()
    if device.startswith("cuda"):
        from vllm_omni.platforms.cuda import CudaPlatform

        return CudaPlatform()
    return current_platform()


def free_cached_memory() -> None:
    """Give back what PyTorch keeps of a device for later, if this process uses one through it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def synchronize_device() -> None:
    """Wait until the device has done all that it was given, if this process uses one.

    Raises:
        RuntimeError: it could not: the device is in no state to go on.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
