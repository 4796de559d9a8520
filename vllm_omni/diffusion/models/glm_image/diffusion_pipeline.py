"""GLM-Image text to image, batched by the denoise step.

The image tokens come from the text stage before. The denoiser has no mask for padded texts, so rows
whose texts have different lengths, those of guidance too, do not share a forward.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import torch
from diffusers.pipelines.glm_image.pipeline_glm_image import calculate_shift

from vllm_omni.diffusion.models.glm_image import capabilities
from vllm_omni.diffusion.models.glm_image.bridges import TOKENS
from vllm_omni.diffusion.models.glm_image.grids import Grids
from vllm_omni.diffusion.models.interface import Capabilities, DenoiseState, PipelineContext
from vllm_omni.diffusion.models.schedules import new_schedule
from vllm_omni.diffusion.models.step_pipeline import (
    Conditioning,
    Row,
    StepState,
    StepwisePipeline,
    grouped,
)
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.errors import BadRequestError

TEXT: Final = "encoder_hidden_states"
PRIOR: Final = "prior_token_id"
IS_DROPPED: Final = "prior_token_drop"


class GlmImage(StepwisePipeline):
    """The denoiser; the text stage has written the image tokens. Guidance is against a picture of
    no text and no tokens."""

    reference_class: ClassVar[str] = "GlmImagePipeline"
    max_text_tokens: ClassVar[int] = 2048
    unused_components: ClassVar[tuple[str, ...]] = ("vision_language_encoder",)

    @staticmethod
    def describe(context: PipelineContext) -> Capabilities:
        return capabilities.text_to_image(context.model_dir)

    def is_guided(self, request: DiffusionRequest) -> bool:
        return (request.guidance_scale or 0.0) > 1

    def texts(self, request: DiffusionRequest) -> tuple[Hashable, ...]:
        """The image tokens count too, and how they lie in the picture."""
        return (*super().texts(request), request.height, request.width, written_tokens(request))

    def encode_one(self, request: DiffusionRequest) -> Conditioning:
        text, negative_text = self.reference.encode_prompt(
            request.prompt,
            self.is_guided(request),
            device=self.device,
            dtype=self.dtype,
            max_sequence_length=self.text_length_of(request),
        )
        tokens = self.prior_tokens(request)
        keep, drop = torch.zeros_like(tokens, dtype=torch.bool), torch.ones_like(tokens).bool()
        negative = None
        if self.is_guided(request):
            negative = {TEXT: negative_text, PRIOR: tokens, IS_DROPPED: drop}
        return Conditioning({TEXT: text, PRIOR: tokens, IS_DROPPED: keep}, negative)

    def prior_tokens(self, request: DiffusionRequest) -> torch.Tensor:
        """Tokens of the large picture, one per patch of the denoiser: [1, tokens]."""
        assert request.height is not None, "the capabilities have a default"
        assert request.width is not None, "the capabilities have a default"
        grids = Grids.of_size(request.height, request.width)
        written = written_tokens(request)
        large = written[grids.num_small : grids.num_small + grids.num_large]
        if len(large) < grids.num_large:
            # It may not end sooner of its own accord.
            raise BadRequestError(
                f"the prompt is too long: it left room for {len(written)} of "
                f"{grids.num_small + grids.num_large} image tokens",
                field="prompt",
            )
        tokens = torch.tensor([large], dtype=torch.long, device=self.device)
        return self.reference._upsample_token_ids(tokens, grids.rows, grids.columns)

    def noise(self, request: DiffusionRequest, height: int, width: int) -> torch.Tensor:
        channels = self.reference.transformer.config.in_channels
        return self.reference.prepare_latents(
            1, channels, height, width, self.dtype, self.device, self.new_generator(request)
        )

    def schedule(self, request: DiffusionRequest, latents: torch.Tensor) -> Any:
        config, reference = self.reference.scheduler.config, self.reference
        num_pixels = latents.shape[2] * latents.shape[3]
        count = config.num_train_timesteps
        timesteps = np.linspace(count, 1.0, request.num_inference_steps + 1)[:-1]
        timesteps = timesteps.astype(np.int64).astype(np.float32)
        return new_schedule(
            reference,
            self.device,
            timesteps=timesteps,
            sigmas=timesteps / count,
            mu=calculate_shift(
                num_pixels // reference.transformer.config.patch_size**2,
                config.get("base_image_seq_len", 256),
                config.get("base_shift", 0.25),
                config.get("max_shift", 0.75),
            ),
        )

    def batch_key(self, state: DenoiseState) -> Hashable:
        assert isinstance(state, StepState)
        return super().batch_key(state), state.conditioning.positive[TEXT].shape

    def parts(self, states: Sequence[Any], rows: list[Row]) -> Sequence[Sequence[int]]:
        """Rows whose texts have one length."""
        return grouped(row[TEXT].shape[1] for row in rows)

    def forward(
        self, states: Sequence[Any], latents: torch.Tensor, timesteps: torch.Tensor, rows: list[Row]
    ) -> Sequence[torch.Tensor]:
        transformer = self.reference.transformer
        size = torch.tensor([[states[0].height, states[0].width]], dtype=self.dtype)
        size = size.to(self.device, non_blocking=True).repeat(len(rows), 1)
        (output,) = transformer(
            hidden_states=latents.to(transformer.dtype),
            encoder_hidden_states=torch.cat([row[TEXT] for row in rows]),
            prior_token_id=torch.cat([row[PRIOR] for row in rows]),
            prior_token_drop=torch.cat([row[IS_DROPPED] for row in rows]),
            timestep=timesteps - 1,
            target_size=size,
            crop_coords=torch.zeros_like(size),
            attention_kwargs={},
            return_dict=False,
        )
        return output.float().split(1)

    def decode_latents(self, state: Any, latents: torch.Tensor) -> torch.Tensor:
        vae = self.reference.vae
        latents = latents.to(vae.dtype)
        shape = (1, vae.config.latent_channels, 1, 1)
        mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents.device, latents.dtype)
        std = torch.tensor(vae.config.latents_std).view(shape).to(latents.device, latents.dtype)
        (pixels,) = vae.decode(latents * std + mean, return_dict=False)
        return pixels[0]


def written_tokens(request: DiffusionRequest) -> tuple[int, ...]:
    """What the text stage has written: a small picture, then the large one."""
    written = request.upstream.get(TOKENS, ())
    assert isinstance(written, Sequence), "the bridge gives token ids"
    return tuple(written)
