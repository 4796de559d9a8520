"""Qwen-Image and Qwen-Image-Edit, batched by the denoise step."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Final

import PIL.Image
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit

from vllm_omni.diffusion.accelerations import feed_forward, flash_attention
from vllm_omni.diffusion.models.interface import Capabilities, DenoiseState, PipelineContext
from vllm_omni.diffusion.models.qwen_image import capabilities
from vllm_omni.diffusion.models.qwen_image.rotary import use_real_numbers
from vllm_omni.diffusion.models.schedules import linear_sigmas, new_schedule, shift_of
from vllm_omni.diffusion.models.step_pipeline import (
    Conditioning,
    Row,
    StepwisePipeline,
    grouped,
    latent_statistics,
)
from vllm_omni.diffusion.request import DiffusionRequest

TEXT: Final = "encoder_hidden_states"
PICTURE: Final = "picture"
MAX_PADDED_TOKENS: Final = 2048
"""Latent tokens of a row up to which texts of different lengths share a forward, padded, where
torch's attention takes the mask: of the measured sizes 512x512 (1,024 tokens) is faster so and
1024x1024 (4,096) slower. FlashAttention 3 has no such bound."""
INPUT_PIXELS: Final = 1024 * 1024
"""The input picture is scaled to about so many, whatever comes out."""


class QwenImage(StepwisePipeline):
    """Text to image. Prompts of different lengths share a forward: padding is masked."""

    reference_class: ClassVar[str] = "QwenImagePipeline"
    max_text_tokens: ClassVar[int] = 1024

    @staticmethod
    def describe(context: PipelineContext) -> Capabilities:
        return capabilities.text_to_image(context.model_dir)

    def prepare_for_compiler(self) -> None:
        use_real_numbers(self.reference.transformer)
        feed_forward.fuse_gelu(self.reference.transformer)

    def time_embedder(self) -> torch.nn.Module | None:
        config = self.reference.transformer.config
        if config.get("zero_cond_t") or config.get("use_additional_t_cond"):
            return None  # rows of two times, or of more than the time
        embedder: torch.nn.Module = self.reference.transformer.time_text_embed
        return embedder

    def embed_time(self, state: Any, row: Row, timesteps: torch.Tensor) -> torch.Tensor:
        latents = state.latents
        embedder = self.reference.transformer.time_text_embed
        embedding: torch.Tensor = embedder.forward(timesteps.to(latents.dtype) / 1000, latents)
        return embedding

    def is_guided(self, request: DiffusionRequest) -> bool:
        return (request.true_cfg_scale or 0.0) > 1 and request.negative_prompt is not None

    def encode_one(self, request: DiffusionRequest) -> Conditioning:
        negative = None
        if self.is_guided(request):
            negative = {TEXT: self._encode_text(request.negative_prompt, request)}
        return Conditioning({TEXT: self._encode_text(request.prompt, request)}, negative)

    def _encode_text(self, text: str | None, request: DiffusionRequest) -> torch.Tensor:
        embeddings, _ = self.reference.encode_prompt(
            text, device=self.device, max_sequence_length=self.text_length_of(request)
        )
        return embeddings

    def scale_of(self, request: DiffusionRequest) -> float:
        return request.true_cfg_scale or 1.0

    def noise(self, request: DiffusionRequest, height: int, width: int) -> torch.Tensor:
        channels = self.reference.transformer.config.in_channels // 4
        return self.reference.prepare_latents(
            1, channels, height, width, self.dtype, self.device, self.new_generator(request)
        )

    def schedule(self, request: DiffusionRequest, latents: torch.Tensor) -> Any:
        return new_schedule(
            self.reference,
            self.device,
            sigmas=linear_sigmas(request.num_inference_steps),
            mu=shift_of(self.reference.scheduler.config, latents.shape[1]),
        )

    def grids(self, state: Any) -> list[tuple[int, int, int]]:
        """Frames, rows and columns of tokens of each picture in the input."""
        patch = self.reference.vae_scale_factor * 2
        return [(1, state.height // patch, state.width // patch)]

    def parts(self, states: Sequence[Any], rows: list[Row]) -> Sequence[Sequence[int]]:
        """Large rows share a forward where their texts have one length: attention under the mask
        of a padded text costs more there than a forward of their own."""
        num_tokens = sum(math.prod(grid) for grid in self.grids(states[0]))
        is_cheap = flash_attention.is_used_in(self.reference.transformer)
        if is_cheap or num_tokens <= MAX_PADDED_TOKENS:
            return super().parts(states, rows)
        return grouped(row[TEXT].shape[1] for row in rows)

    def forward(
        self, states: Sequence[Any], latents: torch.Tensor, timesteps: torch.Tensor, rows: list[Row]
    ) -> Sequence[torch.Tensor]:
        text, mask = pad([row[TEXT] for row in rows])
        (output,) = self.reference.transformer(
            hidden_states=latents,
            timestep=timesteps.to(latents.dtype) / 1000,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            img_shapes=[self.grids(states[0])] * len(rows),
            return_dict=False,
        )
        num_tokens = states[0].latents.shape[1]
        return output[:, :num_tokens].split(1)

    def guide(self, state: Any, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        """The length of the conditional prediction is kept, token by token."""
        combined = StepwisePipeline.guide(self, state, positive, negative)
        length = torch.norm(positive, dim=-1, keepdim=True)
        return combined * (length / torch.norm(combined, dim=-1, keepdim=True))

    def decode_latents(self, state: Any, latents: torch.Tensor) -> torch.Tensor:
        vae = self.reference.vae
        latents = self.reference._unpack_latents(
            latents, state.height, state.width, self.reference.vae_scale_factor
        ).to(vae.dtype)
        mean, inverse_std = latent_statistics(vae, latents)
        (pixels,) = vae.decode(latents / inverse_std + mean, return_dict=False)
        return pixels[0, :, 0]


class QwenImageEdit(QwenImage):
    """A picture and an instruction to an edited picture: the picture's latents stand behind those
    that are denoised, and the text encoder sees the picture."""

    reference_class: ClassVar[str] = "QwenImageEditPipeline"

    @staticmethod
    def describe(context: PipelineContext) -> Capabilities:
        return capabilities.edit(context.model_dir)

    def size_of(self, request: DiffusionRequest) -> tuple[int, int]:
        height, width = input_size(request)
        multiple = self.reference.vae_scale_factor * 2
        height, width = request.height or height, request.width or width
        return height // multiple * multiple, width // multiple * multiple

    def encode_one(self, request: DiffusionRequest) -> Conditioning:
        height, width = input_size(request)
        processor = self.reference.image_processor
        image = processor.resize(PIL.Image.fromarray(request.images[0]), height, width)
        pixels = processor.preprocess(image, height, width).unsqueeze(2)
        latents = self.reference._encode_vae_image(
            pixels.to(device=self.device, dtype=self.dtype), generator=None
        )
        channels, (rows, columns) = self.reference.latent_channels, latents.shape[3:]
        picture = self.reference._pack_latents(latents, 1, channels, rows, columns)
        negative = None
        if self.is_guided(request):
            negative = {TEXT: self._encode_both(request.negative_prompt, image), PICTURE: picture}
        text = self._encode_both(request.prompt, image)
        return Conditioning({TEXT: text, PICTURE: picture}, negative)

    def _encode_both(self, text: str | None, image: PIL.Image.Image) -> torch.Tensor:
        embeddings, _ = self.reference.encode_prompt(text, image=image, device=self.device)
        return embeddings

    def noise(self, request: DiffusionRequest, height: int, width: int) -> torch.Tensor:
        channels = self.reference.transformer.config.in_channels // 4
        latents, _ = self.reference.prepare_latents(
            None, 1, channels, height, width, self.dtype, self.device, self.new_generator(request)
        )
        return latents

    def model_input(self, state: Any) -> torch.Tensor:
        return torch.cat([state.latents, state.conditioning.positive[PICTURE]], dim=1)

    def grids(self, state: Any) -> list[tuple[int, int, int]]:
        patch = self.reference.vae_scale_factor * 2
        height, width = input_size(state.request)
        return [*super().grids(state), (1, height // patch, width // patch)]

    def batch_key(self, state: DenoiseState) -> Hashable:
        return super().batch_key(state), input_size(state.request)


def input_size(request: DiffusionRequest) -> tuple[int, int]:
    """Height and width that the reference scales the input picture to."""
    height, width, _ = request.images[0].shape
    columns, rows, _ = pipeline_qwenimage_edit.calculate_dimensions(INPUT_PIXELS, width / height)
    return rows, columns


def pad(texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[1, L, D] of different L to [B, max L, D] and which are real; no mask where all are."""
    lengths = [text.shape[1] for text in texts]
    longest = max(lengths)
    if min(lengths) == longest:
        return torch.cat(list(texts)), None
    padded = torch.cat(
        [torch.nn.functional.pad(text, (0, 0, 0, longest - text.shape[1])) for text in texts]
    )
    mask = torch.zeros(padded.shape[:2], dtype=torch.bool)
    for i, length in enumerate(lengths):
        mask[i, :length] = True
    return padded, mask.to(padded.device, non_blocking=True)
