"""CPUs of x86-64 and others. One device; replicas share its cores by their thread counts."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from vllm_omni.platforms import Device

_BIND = "VLLM_CPU_OMP_THREADS_BIND"


class CpuPlatform:
    """This host's processor as a device."""

    device_type = "cpu"

    def devices(self) -> tuple[Device, ...]:
        return (Device("cpu", _memory_bytes()),)

    def child_env(self, devices: tuple[str, ...]) -> dict[str, str]:
        if len(devices) == 1 or _BIND in os.environ:
            return {}
        # vLLM would bind each rank to a memory node of its own and refuse to start with fewer.
        return {_BIND: "nobind"}

    def yielding_env(self) -> dict[str, str]:
        return {}

    def default_devices(self, replica: int, world_size: int) -> tuple[str, ...]:
        return ("cpu",) * world_size

    def default_num_threads(self, num_replicas: int) -> int:
        return max(1, len(os.sched_getaffinity(0)) // max(1, num_replicas))

    def using(self, device: str) -> AbstractContextManager[object]:
        return nullcontext()

    def limit_memory(self, device: str, fraction: float) -> None:
        """The kernel shares it out."""

    def fence(self, device: str) -> Callable[[], None]:
        return _nothing

    def prepare_process(self) -> None:
        enable_amx()


def _nothing() -> None:
    """A processor has done what it was given when the call returns."""


def enable_amx() -> None:
    """Ask the kernel for the AMX state: without it the first bf16 product dies with SIGILL."""
    if platform.machine() == "x86_64":
        import torch

        torch.cpu._init_amx()


def _memory_bytes() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = file.read().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))
