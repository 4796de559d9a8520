"""Stable Diffusion 3 and 3.5 text to image, batched by the denoise step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Final

import torch

from vllm_omni.diffusion.models.interface import Capabilities, DenoiseState, PipelineContext
from vllm_omni.diffusion.models.schedules import new_schedule, shift_of
from vllm_omni.diffusion.models.stable_diffusion_3 import capabilities
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


class StableDiffusion3(StepwisePipeline):
    """Guidance needs no negative prompt: without one, the empty text is the other row."""

    reference_class: ClassVar[str] = "StableDiffusion3Pipeline"
    modulation_reads_text: ClassVar[bool] = True

    @staticmethod
    def describe(context: PipelineContext) -> Capabilities:
        return capabilities.text_to_image(context.model_dir)

    def is_guided(self, request: DiffusionRequest) -> bool:
        return (request.guidance_scale or 0.0) > 1

    def encode_one(self, request: DiffusionRequest) -> Conditioning:
        text, negative_text, pooled, negative_pooled = self.reference.encode_prompt(
            request.prompt,
            None,
            None,
            device=self.device,
            negative_prompt=request.negative_prompt,
            do_classifier_free_guidance=self.is_guided(request),
            max_sequence_length=self.text_length_of(request),
        )
        negative = None
        if self.is_guided(request):
            negative = {TEXT: negative_text, POOLED: negative_pooled}
        return Conditioning({TEXT: text, POOLED: pooled}, negative)

    def noise(self, request: DiffusionRequest, height: int, width: int) -> torch.Tensor:
        channels = self.reference.transformer.config.in_channels
        return self.reference.prepare_latents(
            1, channels, height, width, self.dtype, self.device, self.new_generator(request)
        )

    def schedule(self, request: DiffusionRequest, latents: torch.Tensor) -> Any:
        config = self.reference.scheduler.config
        shift = {}
        if config.get("use_dynamic_shifting"):
            patch = self.reference.transformer.config.patch_size
            num_tokens = (latents.shape[2] // patch) * (latents.shape[3] // patch)
            shift["mu"] = shift_of(config, num_tokens, max_shift=1.16)
        return new_schedule(
            self.reference, self.device, num_inference_steps=request.num_inference_steps, **shift
        )

    def batch_key(self, state: DenoiseState) -> Hashable:
        assert isinstance(state, StepState)
        return super().batch_key(state), state.conditioning.positive[TEXT].shape

    def forward(
        self, states: Sequence[Any], latents: torch.Tensor, timesteps: torch.Tensor, rows: list[Row]
    ) -> Sequence[torch.Tensor]:
        (output,) = self.reference.transformer(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=torch.cat([row[TEXT] for row in rows]),
            pooled_projections=torch.cat([row[POOLED] for row in rows]),
            return_dict=False,
        )
        return output.split(1)

    def time_embedder(self) -> torch.nn.Module:
        embedder: torch.nn.Module = self.reference.transformer.time_text_embed
        return embedder

    def embed_time(self, state: Any, row: Row, timesteps: torch.Tensor) -> torch.Tensor:
        embedding: torch.Tensor = self.reference.transformer.time_text_embed.forward(
            timesteps, row[POOLED].expand(len(timesteps), -1)
        )
        return embedding

    def decode_latents(self, state: Any, latents: torch.Tensor) -> torch.Tensor:
        vae = self.reference.vae
        (pixels,) = vae.decode(scaled_for_kl(vae, latents), return_dict=False)
        return pixels[0]
