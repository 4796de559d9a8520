"""Qwen-Image's rotary embedding in real numbers against the reference's in complex ones."""

from __future__ import annotations

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers import transformer_qwenimage

from vllm_omni.diffusion.models.qwen_image.rotary import rotated, use_real_numbers

REFERENCE = transformer_qwenimage.apply_rotary_emb_qwen


def transformer() -> QwenImageTransformer2DModel:
    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        axes_dims_rope=(4, 6, 6),
    ).eval()


def test_queries_are_rotated_as_by_complex_numbers() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 8)
    angles = torch.randn(5, 4)
    frequencies = torch.polar(torch.ones_like(angles), angles)

    made = rotated(x, torch.view_as_real(frequencies))

    torch.testing.assert_close(made, REFERENCE(x, frequencies, use_real=False))


@torch.inference_mode()
def test_a_transformer_says_the_same_and_others_are_left_as_they_were() -> None:
    changed, other = transformer(), transformer()
    use_real_numbers(changed)
    torch.manual_seed(1)
    arguments = {
        "hidden_states": torch.randn(2, 16, 16),
        "encoder_hidden_states": torch.randn(2, 3, 8),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_shapes": [[(1, 4, 4)]] * 2,
        "return_dict": False,
    }

    (made,), (expected,) = changed(**arguments), other(**arguments)

    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)
    assert transformer_qwenimage.apply_rotary_emb_qwen is not REFERENCE
