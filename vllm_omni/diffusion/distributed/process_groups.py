"""How ranks reach each other: torch.distributed between processes of one host.

They meet through a file in a folder that only this user can enter. What they say on the host goes
by gloo over loopback, rows between devices by the device's own library. Nothing is pickled.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from vllm_omni.diffusion.distributed.exchange import Exchange, Gather
from vllm_omni.platforms import platform_of

_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}
_TIMEOUT: Final = datetime.timedelta(hours=2)
"""For a rank that hangs while nothing watches the replica; the supervisor is far sooner."""


def meet(rank: int, num_ranks: int, device: str, store: Path) -> Exchange:
    """Wait until every rank is there. Once in a process."""
    backend = _BACKENDS[platform_of(device).device_type]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=_TIMEOUT,
    )
    on_host = on_device = _gather(dist.group.WORLD)
    if backend != "gloo":
        on_device = _gather(dist.new_group(backend=backend, timeout=_TIMEOUT))
    return Exchange(rank, num_ranks, device, on_host=on_host, on_device=on_device)


def _gather(group: dist.ProcessGroup | None) -> Gather:
    # The same function under its newer and its older name.
    by_name = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def gather(received: torch.Tensor, sent: torch.Tensor) -> None:
        # As bytes: not every library knows every type of number.
        by_name(received.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), group=group)

    return gather
