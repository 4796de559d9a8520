"""Codes to a mel spectrogram and that to a waveform, chunk by chunk, with the reference's modules.

The first network attends in blocks: a block sees two before it and one after it. So a chunk is
made from a window of its own: the codes of two blocks before it, its own, those of one block after
it; the waveform network then reads the mel frames that chunks have left, with some more on either
side of what it is asked for. What a window holds, and the noise it starts from, depend on the
request and the ramp alone.

Legend of shapes: B requests, F codes of a window, M mel frames of it, C channels, L steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavDiTModel,
    Qwen2_5OmniToken2WavModel,
    RungeKutta4ODESolver,
)

GUIDANCE_SCALE: Final = 0.5
SWAY: Final = -1.0
"""How the time steps are moved towards the beginning."""


@dataclass(frozen=True, slots=True, eq=False)
class Speaker:
    """What a voice gives to every window, `[1, ...]` each; beside it the same for no voice."""

    embedding: Tensor
    reference: Tensor
    """The encoding of the voice's own mel spectrogram."""
    no_reference: Tensor


class MelSampler:
    """Draws mel frames for windows of codes by following the flow from noise."""

    def __init__(self, dit: Qwen2_5OmniToken2WavDiTModel, num_steps: int) -> None:
        self._dit = dit
        self._num_steps = num_steps
        self._mel_dim = int(dit.mel_dim)
        self.repeats = int(dit.repeats)
        """Mel frames of a code."""
        self.block_codes = int(dit.block_size) // self.repeats

    def speaker(self, embedding: Tensor, reference_mel: Tensor) -> Speaker:
        """Encode a voice once; the reference does it in every step."""
        encode = self._dit.input_embed.spk_encoder
        silence = torch.zeros_like(reference_mel)
        return Speaker(embedding, encode(reference_mel), encode(silence))

    def window_start(self, first: int) -> int:
        """The first code of the window for a chunk that begins at code `first`: on the grid of
        blocks, as the network's own blocks count from the window's beginning."""
        block = self.block_codes
        return max(0, first // block * block - 2 * block)

    def sample(self, codes_BF: Tensor, noise_BMC: Tensor, speakers: Sequence[Speaker]) -> Tensor:
        """Mel frames `[B, M, C]` for windows of the same length."""
        fixed_2BMC = self._fixed_input(codes_BF, speakers)
        num_frames = noise_BMC.shape[1]
        device = noise_BMC.device
        position_ids = torch.arange(num_frames, device=device)[None]
        rotary = self._dit.rotary_embed(fixed_2BMC, position_ids)
        blocks = torch.arange(num_frames, device=device) // self._dit.block_size
        difference = (blocks[None, :] - blocks[:, None])[None, None]

        def velocity(time: Tensor, x_BMC: Tensor) -> Tensor:
            both = self._predict(x_BMC, time, fixed_2BMC, rotary, difference)
            guided, unguided = both.chunk(2, dim=0)
            return guided + (guided - unguided) * GUIDANCE_SCALE

        return self._integrate(velocity, noise_BMC)

    def _integrate(self, velocity: Any, x_BMC: Tensor) -> Tensor:
        times = torch.linspace(0, 1, self._num_steps, device=x_BMC.device, dtype=x_BMC.dtype)
        times = times + SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)
        solver = RungeKutta4ODESolver(function=velocity, initial_value=x_BMC)
        # The solver's own loop compares times on the host, which waits for the device each time.
        for i in range(self._num_steps - 1):
            start, end = times[i], times[i + 1]
            change, _ = solver._compute_step(velocity, start, end - start, end, x_BMC)
            x_BMC = x_BMC + change
        return x_BMC

    def _fixed_input(self, codes_BF: Tensor, speakers: Sequence[Speaker]) -> Tensor:
        """What the input projection makes of everything but the noised mel frames: with codes and
        voice, and below without, as guidance wants it."""
        dit = self._dit
        num_frames = codes_BF.shape[1] * self.repeats
        embedding = torch.cat([s.embedding for s in speakers])
        voice = torch.cat([embedding, torch.zeros_like(embedding)])
        reference = torch.cat([s.reference for s in speakers] + [s.no_reference for s in speakers])
        codes = torch.cat([dit.text_embed(codes_BF), dit.text_embed(codes_BF, drop_code=True)])
        over_time = [part[:, None].expand(-1, num_frames, -1) for part in (reference, voice)]
        fixed = torch.cat([over_time[0], codes, over_time[1]], dim=-1)
        projection = dit.input_embed.proj
        return functional.linear(fixed, projection.weight[:, self._mel_dim :], projection.bias)

    def _predict(
        self, x_BMC: Tensor, time: Tensor, fixed_2BMC: Tensor, rotary: Any, difference: Tensor
    ) -> Tensor:
        dit = self._dit
        weight = dit.input_embed.proj.weight[:, : self._mel_dim]
        hidden = functional.linear(x_BMC, weight).repeat(2, 1, 1) + fixed_2BMC
        time_embedding = dit.time_embed(time.repeat(len(hidden)))
        for block in dit.transformer_blocks:
            hidden = block(
                hidden, time_embedding, position_embeddings=rotary, block_diff=difference
            )
        velocity: Tensor = dit.proj_out(dit.norm_out(hidden, time_embedding))
        return velocity


class WaveDecoder:
    """Mel frames to samples."""

    def __init__(self, model: Qwen2_5OmniToken2WavModel) -> None:
        self._vocoder = model.code2wav_bigvgan_model
        rates = self._vocoder.config.upsample_rates
        self.samples_per_mel = int(torch.tensor(rates).prod())

    def decode(self, mel_BMC: Tensor) -> Tensor:
        """Samples `[B, S]`, on the host."""
        samples: Tensor = self._vocoder(mel_BMC.transpose(1, 2))
        return samples.reshape(len(mel_BMC), -1)
