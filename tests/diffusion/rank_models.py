"""A small model whose second rank does what words in a prompt say.

`!starved` finds no memory there, `!crowded` has memory for one row at a time, `!guide` finds none
after the rows were exchanged, `!encode` raises in the encoder, `!hang` never ends its forward.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from vllm_omni.diffusion.models.qwen_image.diffusion_pipeline import QwenImage
from vllm_omni.diffusion.models.step_pipeline import Conditioning, Row
from vllm_omni.diffusion.request import DiffusionRequest


class FaultyQwenImage(QwenImage):
    """On the first rank, and with other prompts, the model as it is."""

    def encode_one(self, request: DiffusionRequest) -> Conditioning:
        if self._is_told("!encode", request.prompt):
            raise ValueError("cannot encode that")
        return super().encode_one(request)

    def forward(
        self, states: Sequence[Any], latents: torch.Tensor, timesteps: torch.Tensor, rows: list[Row]
    ) -> Sequence[torch.Tensor]:
        for state in states:
            prompt = state.request.prompt
            if self._is_told("!starved", prompt) or (
                len(rows) > 1 and self._is_told("!crowded", prompt)
            ):
                raise torch.OutOfMemoryError("CUDA out of memory")
            if self._is_told("!hang", prompt) and state.step_index:
                threading.Event().wait(600)
        return super().forward(states, latents, timesteps, rows)

    def guide(self, state: Any, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        if self._is_told("!guide", state.request.prompt) and state.step_index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().guide(state, positive, negative)

    def _is_told(self, word: str, prompt: str) -> bool:
        return self.ranks.rank == 1 and word in prompt
