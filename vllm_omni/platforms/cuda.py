"""NVIDIA GPUs. The API process asks NVML only: it never makes a CUDA context of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

from vllm_omni.errors import ConfigError
from vllm_omni.platforms import Device
from vllm_omni.platforms.cpu import CpuPlatform, enable_amx

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class CudaPlatform:
    """The GPUs this process may use; `cuda:0` is the first of `CUDA_VISIBLE_DEVICES`."""

    device_type = "cuda"

    def devices(self) -> tuple[Device, ...]:
        from vllm.platforms import current_platform as host

        return tuple(
            Device(f"cuda:{i}", host.get_device_total_memory(i)) for i in range(host.device_count())
        )

    def child_env(self, devices: tuple[str, ...]) -> dict[str, str]:
        visible = os.environ.get(_VISIBLE, "")
        known = visible.split(",") if visible else None
        return {_VISIBLE: ",".join(_physical(name, known) for name in devices)}

    def yielding_env(self) -> dict[str, str]:
        return {"CUDA_MPS_CLIENT_PRIORITY": "1"}  # below normal

    def default_devices(self, replica: int, world_size: int) -> tuple[str, ...]:
        names = [device.name for device in self.devices()]
        first = replica * world_size % max(1, len(names))
        if first + world_size > len(names):
            raise ConfigError(
                f"a replica of {world_size} ranks needs as many GPUs, found {len(names)}"
            )
        return tuple(names[first : first + world_size])

    def default_num_threads(self, num_replicas: int) -> int:
        # Only host work: tokens, schedules, copies.
        return max(1, min(8, len(os.sched_getaffinity(0)) // max(1, num_replicas)))

    def using(self, device: str) -> AbstractContextManager[object]:
        import torch

        if device == "cpu":
            return CpuPlatform().using(device)
        context: AbstractContextManager[object] = torch.cuda.device(device)
        return context

    def limit_memory(self, device: str, fraction: float) -> None:
        import torch

        if device != "cpu":
            torch.cuda.set_per_process_memory_fraction(fraction, device)

    def fence(self, device: str) -> Callable[[], None]:
        import torch

        if device == "cpu":
            return CpuPlatform().fence(device)
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        wait: Callable[[], None] = event.synchronize
        return wait

    def prepare_process(self) -> None:
        # The workers make the CUDA context; preprocessing still multiplies on the host.
        enable_amx()


def _physical(name: str, visible: list[str] | None) -> str:
    kind, _, number = name.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise ConfigError(f"no such device: {name!r}; devices are named cuda:0, cuda:1, ...")
    if visible is None:
        return number
    if int(number) >= len(visible):
        raise ConfigError(f"no such device: {name!r}; {_VISIBLE} has {len(visible)} devices")
    return visible[int(number)].strip()
