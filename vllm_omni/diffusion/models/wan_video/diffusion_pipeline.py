"""Wan 2.1 and 2.2, text to video and image to video, batched by the denoise step.

Some of Wan 2.2 have a second denoiser for the steps with little noise: then a step is one forward
of each that has members. The small Wan 2.2 gives every token a timestep of its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import PIL.Image
import torch
from diffusers import WanPipeline
from diffusers.utils.torch_utils import randn_tensor

from vllm_omni.diffusion.models.interface import Capabilities, DenoiseState, PipelineContext
from vllm_omni.diffusion.models.schedules import new_schedule
from vllm_omni.diffusion.models.step_pipeline import (
    Conditioning,
    Row,
    StepState,
    StepwisePipeline,
    grouped,
    latent_statistics,
)
from vllm_omni.diffusion.models.wan_video import capabilities
from vllm_omni.diffusion.request import DiffusionRequest

TEXT: Final = "encoder_hidden_states"
SEEN: Final = "encoder_hidden_states_image"
PICTURE: Final = "picture"
"""Latents of the picture, in the small Wan 2.2 of one frame, else with masks and of every frame."""


@dataclass(slots=True, eq=False, kw_only=True)
class WanState(StepState):
    """Also knows when the second denoiser takes over."""

    first_low_noise_step: int

    @property
    def has_low_noise(self) -> bool:
        return self.step_index >= self.first_low_noise_step


class WanTextToVideo(StepwisePipeline):
    """Latents stay in float32, and so does the autoencoder, as the reference advises."""

    reference_class: ClassVar[str] = "WanPipeline"
    component_dtypes: ClassVar[Mapping[str, torch.dtype]] = {"vae": torch.float32}

    @staticmethod
    def describe(context: PipelineContext) -> Capabilities:
        return capabilities.text_to_video(context.model_dir)

    def is_guided(self, request: DiffusionRequest) -> bool:
        return (request.guidance_scale or 0.0) > 1

    def encode_one(self, request: DiffusionRequest) -> Conditioning:
        picture = self.encode_picture(request)
        negative = None
        if self.is_guided(request):
            negative = {TEXT: self._encode_text(request.negative_prompt or "", request), **picture}
        return Conditioning({TEXT: self._encode_text(request.prompt, request), **picture}, negative)

    def _encode_text(self, text: str, request: DiffusionRequest) -> torch.Tensor:
        # Of the text-to-video class for both: the other one needs a package to clean texts.
        embeddings = WanPipeline._get_t5_prompt_embeds(
            self.reference,
            text,
            max_sequence_length=self.text_length_of(request),
            device=self.device,
        )
        return embeddings.to(self.reference.transformer.dtype)

    def encode_picture(self, request: DiffusionRequest) -> Row:
        """What the input picture adds to a row."""
        return {}

    def latent_shape(self, request: DiffusionRequest, height: int, width: int) -> tuple[int, ...]:
        """Of one video: batch, channels, frames, rows, columns."""
        reference = self.reference
        return (
            1,
            reference.vae.config.z_dim,
            (request.num_frames - 1) // reference.vae_scale_factor_temporal + 1,
            height // reference.vae_scale_factor_spatial,
            width // reference.vae_scale_factor_spatial,
        )

    def noise(self, request: DiffusionRequest, height: int, width: int) -> torch.Tensor:
        return randn_tensor(
            self.latent_shape(request, height, width),
            generator=self.new_generator(request),
            device=self.device,
            dtype=torch.float32,
        )

    def schedule(self, request: DiffusionRequest, latents: torch.Tensor) -> Any:
        return new_schedule(
            self.reference, self.device, num_inference_steps=request.num_inference_steps
        )

    def prepare(self, request: DiffusionRequest, conditioning: object) -> WanState:
        state = super().prepare(request, conditioning)
        return WanState(
            request=request,
            latents=state.latents,
            num_steps=state.num_steps,
            conditioning=state.conditioning,
            schedule=state.schedule,
            height=state.height,
            width=state.width,
            guidance_scale=state.guidance_scale,
            first_low_noise_step=self._first_low_noise_step(state.schedule),
        )

    def _first_low_noise_step(self, schedule: Any) -> int:
        ratio = self.reference.config.boundary_ratio
        timesteps = schedule.timesteps.tolist()
        if ratio is None:
            return len(timesteps)
        boundary = ratio * schedule.config.num_train_timesteps
        return bisect.bisect_right([-t for t in timesteps], -boundary)

    def batch_key(self, state: DenoiseState) -> Hashable:
        assert isinstance(state, WanState)
        return super().batch_key(state), state.conditioning.positive[TEXT].shape

    def parts(self, states: Sequence[Any], rows: list[Row]) -> Sequence[Sequence[int]]:
        """Each of two denoisers has its own members."""
        return grouped(state.has_low_noise for state in states)

    def forward(
        self, states: Sequence[Any], latents: torch.Tensor, timesteps: torch.Tensor, rows: list[Row]
    ) -> Sequence[torch.Tensor]:
        reference = self.reference
        denoiser = reference.transformer_2 if states[0].has_low_noise else reference.transformer
        seen = [row[SEEN] for row in rows if SEEN in row]
        (output,) = denoiser(
            hidden_states=latents.to(reference.transformer.dtype),
            timestep=self.token_timesteps(states[0], timesteps),
            encoder_hidden_states=torch.cat([row[TEXT] for row in rows]),
            encoder_hidden_states_image=torch.cat(seen) if seen else None,
            return_dict=False,
        )
        return output.split(1)

    def token_timesteps(self, state: WanState, timesteps: torch.Tensor) -> torch.Tensor:
        """One timestep per row, or [rows, tokens] where tokens have their own."""
        if not self.reference.config.expand_timesteps:
            return timesteps
        noisy = self.noisy_part(state)[0, 0, :, ::2, ::2].flatten()
        return timesteps[:, None] * noisy

    def noisy_part(self, state: WanState) -> torch.Tensor:
        """1 where latents are noise, 0 where they are the picture's."""
        return torch.ones(1, 1, *state.latents.shape[2:], device=self.device)

    def decode_latents(self, state: Any, latents: torch.Tensor) -> torch.Tensor:
        vae = self.reference.vae
        latents = latents.to(vae.dtype)
        mean, inverse_std = latent_statistics(vae, latents)
        (pixels,) = vae.decode(latents / inverse_std + mean, return_dict=False)
        return pixels[0]


class WanImageToVideo(WanTextToVideo):
    """The picture is the first frame: as latents beside the noise, and in Wan 2.1 seen by CLIP."""

    reference_class: ClassVar[str] = "WanImageToVideoPipeline"

    @staticmethod
    def describe(context: PipelineContext) -> Capabilities:
        return capabilities.image_to_video(context.model_dir)

    def conditioning_key(self, request: DiffusionRequest) -> Hashable:
        size = self.size_of(request), request.num_frames
        return super().conditioning_key(request), size

    def encode_picture(self, request: DiffusionRequest) -> Row:
        reference, (height, width) = self.reference, self.size_of(request)
        image = PIL.Image.fromarray(request.images[0])
        pixels = reference.video_processor.preprocess(image, height=height, width=width)
        shape = self.latent_shape(request, height, width)
        _, picture, *_ = reference.prepare_latents(
            pixels.to(self.device, dtype=torch.float32),
            1,
            shape[1],
            height,
            width,
            request.num_frames,
            torch.float32,
            self.device,
            latents=torch.zeros(shape),
        )
        transformer = reference.transformer
        if transformer.config.image_dim is None:
            return {PICTURE: picture}
        seen = reference.encode_image(image, self.device).to(transformer.dtype)
        return {PICTURE: picture, SEEN: seen}

    def model_input(self, state: Any) -> torch.Tensor:
        if self.reference.config.expand_timesteps:
            return self.final_latents(state)
        return torch.cat([state.latents, state.conditioning.positive[PICTURE]], dim=1)

    def noisy_part(self, state: WanState) -> torch.Tensor:
        noisy = torch.ones(1, 1, *state.latents.shape[2:], device=self.device)
        noisy[:, :, 0] = 0
        return noisy

    def final_latents(self, state: Any) -> torch.Tensor:
        if not self.reference.config.expand_timesteps:
            return state.latents
        noisy = self.noisy_part(state)
        return (1 - noisy) * state.conditioning.positive[PICTURE] + noisy * state.latents
