"""Z-Image text to image, batched by the denoise step.

The denoiser takes lists, and pads and masks what differs in length itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

import torch
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas

from vllm_omni.diffusion.models.interface import Capabilities, PipelineContext
from vllm_omni.diffusion.models.schedules import new_schedule, shift_of
from vllm_omni.diffusion.models.step_pipeline import (
    Conditioning,
    Row,
    StepwisePipeline,
    scaled_for_kl,
)
from vllm_omni.diffusion.models.z_image import capabilities
from vllm_omni.diffusion.request import DiffusionRequest

TEXT: Final = "cap_feats"


class ZImage(StepwisePipeline):
    """Latents stay in float32; the denoiser's clock runs from 0 to 1, backwards to the schedule."""

    reference_class: ClassVar[str] = "ZImagePipeline"

    @staticmethod
    def describe(context: PipelineContext) -> Capabilities:
        return capabilities.text_to_image(context.model_dir)

    def is_guided(self, request: DiffusionRequest) -> bool:
        return (request.guidance_scale or 0.0) > 0

    def encode_one(self, request: DiffusionRequest) -> Conditioning:
        texts, negative_texts = self.reference.encode_prompt(
            request.prompt,
            device=self.device,
            do_classifier_free_guidance=self.is_guided(request),
            negative_prompt=request.negative_prompt,
            max_sequence_length=self.text_length_of(request),
        )
        negative = {TEXT: negative_texts[0]} if self.is_guided(request) else None
        return Conditioning({TEXT: texts[0]}, negative)

    def noise(self, request: DiffusionRequest, height: int, width: int) -> torch.Tensor:
        channels = self.reference.transformer.in_channels
        return self.reference.prepare_latents(
            1, channels, height, width, torch.float32, self.device, self.new_generator(request)
        )

    def schedule(self, request: DiffusionRequest, latents: torch.Tensor) -> Any:
        num_tokens = (latents.shape[2] // 2) * (latents.shape[3] // 2)
        return new_schedule(
            self.reference,
            self.device,
            sigmas=get_default_z_image_sigmas(request.num_inference_steps),
            mu=shift_of(self.reference.scheduler.config, num_tokens),
        )

    def forward(
        self, states: Sequence[Any], latents: torch.Tensor, timesteps: torch.Tensor, rows: list[Row]
    ) -> Sequence[torch.Tensor]:
        transformer = self.reference.transformer
        (outputs,) = transformer(
            list(latents.to(transformer.dtype).unsqueeze(2).unbind(0)),
            (1000 - timesteps) / 1000,
            [row[TEXT] for row in rows],
            return_dict=False,
        )
        return [-output.float().squeeze(1).unsqueeze(0) for output in outputs]

    def guide(self, state: Any, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        """Counts from the conditional prediction: a scale of 0 leaves it as it is."""
        return positive + state.guidance_scale * (positive - negative)

    def decode_latents(self, state: Any, latents: torch.Tensor) -> torch.Tensor:
        vae = self.reference.vae
        scaled = scaled_for_kl(vae, latents.to(vae.dtype))
        (pixels,) = vae.decode(scaled, return_dict=False)
        return pixels[0]
