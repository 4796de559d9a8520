"""GELU in the matrix product before it: cuBLASLt applies it to what it is about to write.

As kernels of their own, GELU reads and writes the widest tensor of a block once more. The compiler
cannot do it either: it leaves products of this size to cuBLAS.

T tokens (of all rows), D channels, F channels within the feed-forward layer.
"""

from __future__ import annotations

import torch
from diffusers.models.activations import GELU


@torch.library.custom_op("vllm_omni::linear_gelu", mutates_args=())
def linear_gelu(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation of [..., D] times [F, D] plus [F]: [..., F]."""
    if tokens.is_cuda:
        flat = torch._addmm_activation(bias, tokens.flatten(0, -2), weight.t(), use_gelu=True)
        return flat.unflatten(0, tokens.shape[:-1])
    projected = torch.nn.functional.linear(tokens, weight, bias)
    return torch.nn.functional.gelu(projected, approximate="tanh")


@linear_gelu.register_fake
def _(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return tokens.new_empty(*tokens.shape[:-1], weight.shape[0])


class LinearGelu(torch.nn.Module):
    """A linear layer and GELU by its tanh approximation."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.proj = linear

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return linear_gelu(tokens, self.proj.weight, self.proj.bias)


def is_fusable(linear: torch.nn.Module, activation: torch.nn.Module) -> bool:
    """Whether one kernel does both: not where an adapter may add to the product."""
    return (
        type(linear) is torch.nn.Linear
        and linear.bias is not None
        and linear.weight.dtype in (torch.bfloat16, torch.float16)
        and linear.weight.is_cuda
        and getattr(activation, "approximate", None) == "tanh"
    )


def fuse_gelu(denoiser: torch.nn.Module) -> int:
    """In every feed-forward layer where it can be; how many."""
    num_fused = 0
    for module in list(denoiser.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, GELU) and is_fusable(child.proj, child):
                setattr(module, name, LinearGelu(child.proj))
                num_fused += 1
    return num_fused


def fuse_gelu_beside_attention(denoiser: torch.nn.Module) -> int:
    """In the blocks whose projection and activation are modules of their own; how many."""
    num_fused = 0
    for block in list(denoiser.modules()):
        projection, activation = getattr(block, "proj_mlp", None), getattr(block, "act_mlp", None)
        if projection is None or activation is None or not is_fusable(projection, activation):
            continue
        block.proj_mlp, block.act_mlp = LinearGelu(projection), torch.nn.Identity()
        num_fused += 1
    return num_fused
