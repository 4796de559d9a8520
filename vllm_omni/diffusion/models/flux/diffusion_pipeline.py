"""FLUX.1 text to image, batched by the denoise step.

Every prompt is padded to `max_sequence_length` by the text encoder, as in the reference, so its
length is part of the batch key.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Final

import torch

from vllm_omni.diffusion.accelerations import feed_forward
from vllm_omni.diffusion.models.flux import capabilities
from vllm_omni.diffusion.models.interface import Capabilities, DenoiseState, PipelineContext
from vllm_omni.diffusion.models.schedules import linear_sigmas, new_schedule, shift_of
from vllm_omni.diffusion.models.step_pipeline import (
    Conditioning,
    Row,
    StepState,
    StepwisePipeline,
    scaled_for_kl,
)
from vllm_omni.diffusion.request import DiffusionRequest

TEXT: Final = "encoder_hidden_states"
POOLED: Final = "pooled_projections"


class Flux(StepwisePipeline):
    """dev and schnell."""

    reference_class: ClassVar[str] = "FluxPipeline"
    modulation_reads_text: ClassVar[bool] = True

    @staticmethod
    def describe(context: PipelineContext) -> Capabilities:
        return capabilities.text_to_image(context.model_dir)

    def prepare_for_compiler(self) -> None:
        feed_forward.fuse_gelu(self.reference.transformer)
        feed_forward.fuse_gelu_beside_attention(self.reference.transformer)

    def is_guided(self, request: DiffusionRequest) -> bool:
        return (request.true_cfg_scale or 0.0) > 1 and request.negative_prompt is not None

    def encode_one(self, request: DiffusionRequest) -> Conditioning:
        negative = None
        if self.is_guided(request):
            negative = self._encode_text(request.negative_prompt, request)
        return Conditioning(self._encode_text(request.prompt, request), negative)

    def _encode_text(self, text: str | None, request: DiffusionRequest) -> Row:
        embeddings, pooled, _ = self.reference.encode_prompt(
            text, device=self.device, max_sequence_length=self.text_length_of(request)
        )
        return {TEXT: embeddings, POOLED: pooled}

    def noise(self, request: DiffusionRequest, height: int, width: int) -> torch.Tensor:
        channels = self.reference.transformer.config.in_channels // 4
        latents, _ = self.reference.prepare_latents(
            1, channels, height, width, self.dtype, self.device, self.new_generator(request)
        )
        return latents

    def scale_of(self, request: DiffusionRequest) -> float:
        return request.true_cfg_scale or 1.0

    def schedule(self, request: DiffusionRequest, latents: torch.Tensor) -> Any:
        config, num_steps = self.reference.scheduler.config, request.num_inference_steps
        return new_schedule(
            self.reference,
            self.device,
            num_inference_steps=num_steps,
            sigmas=None if config.get("use_flow_sigmas") else linear_sigmas(num_steps),
            mu=shift_of(config, latents.shape[1]),
        )

    def batch_key(self, state: DenoiseState) -> Hashable:
        assert isinstance(state, StepState)
        return (
            super().batch_key(state),
            (state.height, state.width),
            state.conditioning.positive[TEXT].shape,
        )

    def forward(
        self, states: Sequence[Any], latents: torch.Tensor, timesteps: torch.Tensor, rows: list[Row]
    ) -> Sequence[torch.Tensor]:
        transformer = self.reference.transformer
        text = torch.cat([row[TEXT] for row in rows])
        (output,) = transformer(
            hidden_states=latents,
            timestep=timesteps.to(latents.dtype) / 1000,
            guidance=self._guidance(states),
            pooled_projections=torch.cat([row[POOLED] for row in rows]),
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3, device=self.device, dtype=self.dtype),
            img_ids=self._positions(states[0]),
            return_dict=False,
        )
        return output.split(1)

    def time_embedder(self) -> torch.nn.Module:
        embedder: torch.nn.Module = self.reference.transformer.time_text_embed
        return embedder

    def embed_time(self, state: Any, row: Row, timesteps: torch.Tensor) -> torch.Tensor:
        dtype, num_steps = state.latents.dtype, len(timesteps)
        guidance = self._guidance([state] * num_steps)
        scales = [] if guidance is None else [guidance.to(dtype) * 1000]
        embedding: torch.Tensor = self.reference.transformer.time_text_embed.forward(
            timesteps.to(dtype) / 1000 * 1000, *scales, row[POOLED].expand(num_steps, -1)
        )
        return embedding

    def _guidance(self, states: Sequence[Any]) -> torch.Tensor | None:
        """The distilled guidance scale of each row."""
        if not self.reference.transformer.config.guidance_embeds:
            return None
        scales = [state.request.guidance_scale for state in states]
        return torch.tensor(scales, dtype=torch.float32).to(self.device, non_blocking=True)

    def _positions(self, state: StepState) -> torch.Tensor:
        patch = self.reference.vae_scale_factor * 2
        return self.reference._prepare_latent_image_ids(
            1, state.height // patch, state.width // patch, self.device, self.dtype
        )

    def decode_latents(self, state: Any, latents: torch.Tensor) -> torch.Tensor:
        vae = self.reference.vae
        latents = self.reference._unpack_latents(
            latents, state.height, state.width, self.reference.vae_scale_factor
        )
        (pixels,) = vae.decode(scaled_for_kl(vae, latents), return_dict=False)
        return pixels[0]
