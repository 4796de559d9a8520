"""Decode codes to a waveform chunk by chunk, with the reference's own modules.

The network is causal, so each layer only needs the last inputs it saw: a convolution the ones that
its kernel reaches back to, attention the keys and values of its window. They are kept between
chunks, and a chunk costs the same however much was spoken before. The waveform is the one that the
reference's forward over all codes gives, cut into pieces.

Legend of shapes: B requests, G code groups, F frames of the chunk, C channels, T steps, S samples,
H heads, D width of a head, W frames the attention looks back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2Wav,
)

if TYPE_CHECKING:
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeCode2WavConfig,
    )

States = list[Tensor]
"""What every layer remembers, `[B, ...]` each."""


@dataclass(slots=True)
class _Pass:
    """One chunk on its way through the layers."""

    past: States | None
    """None for the first chunk of requests."""
    new: dict[int, Tensor] = field(default_factory=dict)

    def before(self, index: int) -> Tensor | None:
        return None if self.past is None else self.past[index]


class _Window:
    """Stands where the reference's layers expect a cache of keys and values."""

    def __init__(self, run: _Pass, first_index: int, length: int) -> None:
        self._run = run
        self._first_index = first_index
        self._length = length

    def update(self, k_BHFD: Tensor, v_BHFD: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        both = []
        for i, new in enumerate((k_BHFD, v_BHFD)):
            index = self._first_index + 2 * layer + i
            past = self._run.before(index)
            seen = new if past is None else torch.cat([past, new], dim=2)
            missing = self._length - seen.shape[2]
            kept = torch.nn.functional.pad(seen, (0, 0, max(0, missing), 0))
            self._run.new[index] = kept[:, :, kept.shape[2] - self._length :]
            both.append(seen)
        return both[0], both[1]


class StreamingCode2Wav:
    """Takes over the model it is given: its convolutions then remember between calls."""

    def __init__(self, model: Qwen3OmniMoeCode2Wav) -> None:
        self._model = model
        self._config: Qwen3OmniMoeCode2WavConfig = model.config
        self._run = _Pass(None)
        self._shapes: list[tuple[int, ...]] = []
        for module in model.modules():
            if isinstance(module, Qwen3OmniMoeCausalConvNet) and module.padding:
                self._replace(module, self._causal, module.padding)
            elif isinstance(module, Qwen3OmniMoeCausalTransConvNet) and module.left_pad:
                self._replace(module, self._transposed, _reach(module))
        self._num_convolutions = len(self._shapes)
        self._window = self._config.sliding_window - 1
        attention = model.pre_transformer.layers[0].self_attn
        heads = self._config.num_key_value_heads
        shape = (heads, self._window, attention.head_dim)
        self._shapes += [shape] * (2 * self._config.num_hidden_layers)

    @property
    def state_shapes(self) -> Sequence[tuple[int, ...]]:
        """Shapes of one request's states."""
        return self._shapes

    def decode(
        self, codes_BGF: Tensor, past: States | None, position_B: Tensor
    ) -> tuple[Tensor, States]:
        """The waveform `[B, S]` of a chunk, and what to give with the next one.

        Args:
            past: states after the chunks before; None when there were none.
            position_B: frames decoded before.
        """
        self._run = run = _Pass(past)
        model = self._model
        hidden_BFC = model.code_embedding(codes_BGF + model.code_offset).mean(1)
        num_frames = hidden_BFC.shape[1]
        steps_F = torch.arange(num_frames, device=codes_BGF.device)
        mask = self._mask(steps_F, position_B, has_past=past is not None)
        hidden_BFC = model.pre_transformer(
            inputs_embeds=hidden_BFC,
            position_ids=position_B[:, None] + steps_F,
            attention_mask={"full_attention": mask, "sliding_attention": mask},
            past_key_values=_Window(run, self._num_convolutions, self._window),
        ).last_hidden_state
        x_BCT = hidden_BFC.permute(0, 2, 1)
        for blocks in model.upsample:
            for block in blocks:
                x_BCT = block(x_BCT)
        for block in model.decoder:
            x_BCT = block(x_BCT)
        new = [run.new[i] for i in range(len(self._shapes))]
        return x_BCT[:, 0].clamp(min=-1, max=1), new

    def _mask(self, steps_F: Tensor, position_B: Tensor, *, has_past: bool) -> Tensor:
        """Which of the remembered and the new frames each new frame attends to."""
        first = -self._window if has_past else 0
        keys_K = torch.arange(first, len(steps_F), device=steps_F.device)
        distance_FK = steps_F[:, None] - keys_K
        in_window_FK = (distance_FK >= 0) & (distance_FK <= self._window)
        exists_BK = position_B[:, None] + keys_K >= 0
        return (in_window_FK & exists_BK[:, None])[:, None]

    def _replace(self, module: Any, forward: Any, reach: int) -> None:
        index = len(self._shapes)
        self._shapes.append((module.conv.in_channels, reach))
        module.forward = functools.partial(forward, module, index)

    def _causal(self, module: Any, index: int, x_BCT: Tensor) -> Tensor:
        seen, self._run.new[index] = self._joined(index, x_BCT, module.padding)
        y_BCT: Tensor = module.conv(seen)
        return y_BCT

    def _transposed(self, module: Any, index: int, x_BCT: Tensor) -> Tensor:
        """What later inputs will not change any more, in the coordinates of the reference."""
        reach = _reach(module)
        has_past = self._run.past is not None
        seen, self._run.new[index] = self._joined(index, x_BCT, reach)
        if not has_past:
            seen = x_BCT
        stride = module.conv.stride[0]
        y_BCT: Tensor = module.conv(seen)
        return y_BCT[..., module.left_pad : seen.shape[-1] * stride]

    def _joined(self, index: int, x_BCT: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """The inputs after those remembered (zeros at the beginning), and the last of all."""
        past = self._run.before(index)
        if past is None:
            seen = torch.nn.functional.pad(x_BCT, (reach, 0))
        else:
            seen = torch.cat([past, x_BCT], dim=-1)
        return seen, seen[..., seen.shape[-1] - reach :]


def _reach(module: Any) -> int:
    """Earlier inputs that a transposed convolution adds to what a new one gives."""
    stride = module.conv.stride[0]
    assert module.left_pad % stride == 0, "the released upsampling kernels are multiples of strides"
    reach: int = module.left_pad // stride
    return reach
