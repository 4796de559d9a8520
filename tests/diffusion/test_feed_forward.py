"""GELU in the matrix product: which layers take it and what they say; the kernel on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock

from vllm_omni.diffusion.accelerations import feed_forward


def layer(activation: str = "gelu-approximate") -> FeedForward:
    torch.manual_seed(0)
    return FeedForward(dim=16, dim_out=16, activation_fn=activation).eval()


def tokens() -> torch.Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers on any device and of any type are taken."""
    monkeypatch.setattr(feed_forward, "is_fusable", lambda linear, activation: True)


@pytest.mark.usefixtures("anywhere")
@torch.inference_mode()
def test_a_feed_forward_layer_says_the_same() -> None:
    fused, reference = torch.nn.Sequential(layer()), layer()

    assert feed_forward.fuse_gelu(fused) == 1
    assert isinstance(fused[0].net[0], feed_forward.LinearGelu)
    torch.testing.assert_close(fused(tokens()), reference(tokens()), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("anywhere")
@torch.inference_mode()
def test_a_block_with_its_layer_beside_attention_says_the_same() -> None:
    torch.manual_seed(0)
    block = FluxSingleTransformerBlock(dim=16, num_attention_heads=2, attention_head_dim=8).eval()
    fused = copy.deepcopy(block)
    given = {"encoder_hidden_states": tokens()[:, :2], "temb": tokens()[:, 0]}

    assert feed_forward.fuse_gelu_beside_attention(fused) == 1
    for one, other in zip(fused(tokens(), **given), block(tokens(), **given), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("activation", ["gelu-approximate", "gelu", "geglu"])
def test_a_cpu_keeps_the_models_own(activation: str) -> None:
    assert feed_forward.fuse_gelu(torch.nn.Sequential(layer(activation))) == 0


def test_the_compiler_is_told_the_shape() -> None:
    linear = torch.nn.Linear(16, 32)
    torch.library.opcheck(
        feed_forward.linear_gelu,
        (tokens(), linear.weight.detach(), linear.bias.detach()),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
@torch.inference_mode()
def test_the_kernel_gives_what_torch_gives(is_compiled: bool) -> None:
    reference = layer().to("cuda", torch.bfloat16)
    fused = torch.nn.Sequential(copy.deepcopy(reference))
    assert feed_forward.fuse_gelu(fused) == 1
    function = torch.compile(fused, fullgraph=True, dynamic=True) if is_compiled else fused

    given = tokens().to("cuda", torch.bfloat16)
    torch.testing.assert_close(function(given), reference(given), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_other_activations_and_layers_without_a_bias_are_left_alone() -> None:
    for activation in ("gelu", "geglu"):
        other = torch.nn.Sequential(layer(activation)).to("cuda", torch.bfloat16)
        assert feed_forward.fuse_gelu(other) == 0
    single = torch.nn.Sequential(layer()).to("cuda", torch.float32)
    assert feed_forward.fuse_gelu(single) == 0
