"""FlashAttention behind the dispatcher: the order of keys on any machine, the kernel on a GPU."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn

from vllm_omni.diffusion.accelerations import flash_attention


def tensors(
    dtype: torch.dtype = torch.bfloat16, device: str = "cpu", num_keys: int = 9
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(3, 5, 2, 16), (3, num_keys, 2, 16), (3, num_keys, 2, 16)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def some_keys(num_keys: int = 9) -> torch.Tensor:
    """[3, num_keys]: padding in the middle, in one row none, in one row nearly all."""
    mask = torch.ones(3, num_keys, dtype=torch.bool)
    mask[0, 2:5] = False
    mask[2, 1:] = False
    return mask


def by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    query, key, value = (one.float().transpose(1, 2) for one in (query, key, value))
    result = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return result.transpose(1, 2)


def test_counted_keys_come_first_as_they_stood() -> None:
    order, lengths = flash_attention.counted_first(
        torch.tensor([[True, False, True, True], [False, False, False, True], [True] * 4])
    )

    assert order.tolist() == [[0, 2, 3, 1], [3, 0, 1, 2], [0, 1, 2, 3]]
    assert lengths.tolist() == [3, 1, 4]
    assert lengths.dtype == torch.int32


@pytest.mark.parametrize("shape", [(3, 9), (3, 1, 1, 9)])
def test_a_mask_of_keys_becomes_an_order_and_lengths(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        counted = torch.arange(key.shape[1]) < lengths[:, None]
        return by_torch(query, key, value, counted[:, None, None])

    monkeypatch.setattr(flash_attention, "flash", kernel)
    query, key, value = tensors()
    mask = some_keys()

    made = flash_attention.attention(query, key, value, mask.view(shape))

    torch.testing.assert_close(made, by_torch(query, key, value, mask[:, None, None]))


def test_what_the_kernel_does_not_do_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(*_: object) -> torch.Tensor:
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(flash_attention, "flash", kernel)
    query, key, value = tensors(torch.float32)
    by_query = torch.ones(3, 1, 5, 9, dtype=torch.bool).tril(4)
    added = torch.zeros(3, 1, 1, 9).masked_fill(~some_keys()[:, None, None], float("-inf"))

    for mask in (None, some_keys()[:, None, None], by_query, added):
        made = flash_attention.attention(query, key, value, mask)
        torch.testing.assert_close(made, by_torch(query, key, value, mask))
    halves = tensors()
    made = flash_attention.attention(*halves, by_query)
    torch.testing.assert_close(made.float(), by_torch(*halves, by_query), atol=2e-2, rtol=2e-2)


def test_a_denoiser_is_asked_whether_it_takes_the_kernel() -> None:
    denoiser = FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=1
    )
    assert not flash_attention.is_used_in(denoiser)
    assert flash_attention.use_in(denoiser) == 2
    assert flash_attention.is_used_in(denoiser)


def test_a_cpu_keeps_the_models_own_attention() -> None:
    assert not flash_attention.is_usable("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("num_keys", [9, 1072])
def test_the_kernel_gives_what_torch_gives(num_keys: int, is_compiled: bool) -> None:
    if not flash_attention.is_usable("cuda"):
        pytest.skip("no FlashAttention 3 for this device")
    flash_attention.use_in(torch.nn.Module())
    query, key, value = tensors(device="cuda", num_keys=num_keys)

    def attend(mask: torch.Tensor | None) -> torch.Tensor:
        return dispatch_attention_fn(
            query, key, value, attn_mask=mask, backend=flash_attention.NAME
        )

    function = torch.compile(attend, fullgraph=True, dynamic=True) if is_compiled else attend
    for mask in (None, some_keys(num_keys)[:, None, None].cuda()):
        torch.testing.assert_close(
            function(mask).float(), by_torch(query, key, value, mask), atol=2e-2, rtol=2e-2
        )
