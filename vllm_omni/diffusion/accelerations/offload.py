"""Group offload: weights stay in host memory and come to the device group by group."""

from __future__ import annotations

import torch
from diffusers.hooks import apply_group_offloading

from vllm_omni.diffusion.models.interface import PipelineComponents


def offload_groups(components: PipelineComponents, device: str, *, use_stream: bool) -> None:
    """Leave denoisers and encoders in host memory; the VAE, small and used alone, moves whole.

    With a stream the next group is on its way while one computes.
    """
    for module in (*components.denoisers.values(), *components.encoders.values()):
        apply_group_offloading(
            module,
            onload_device=torch.device(device),
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
            use_stream=use_stream,
        )
    if components.vae is not None:
        components.vae.to(device)
