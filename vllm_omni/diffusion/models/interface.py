"""What a diffusion pipeline is: the seam between the diffusion engine and a family.

A family names its class in `StageConfig.model_class` and a function `model_dir -> Capabilities` in
`StageConfig.capabilities`; that function must not import torch, the API process calls it too.

The engine calls a pipeline from two threads: `encode`, `prepare`, `decode` and `preview` from one,
`denoise_step` (or `run`) from the other, each under `torch.inference_mode()`. So neither pair may
write to state of the pipeline object; what belongs to a request lives in its `DenoiseState`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from vllm_omni.config.pipeline import Modality
from vllm_omni.diffusion.distributed.ranks import OneRank, Ranks
from vllm_omni.diffusion.request import DiffusionRequest

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


class ExecutionMode(enum.StrEnum):
    STEP = "step"
    """The engine batches single denoise steps of many requests."""
    REQUEST = "request"
    """The pipeline makes one request from beginning to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a pipeline can do: checked before a request is admitted, shown in `/v1/models`."""

    mode: ExecutionMode
    emits: Modality = Modality.IMAGE
    """IMAGE or VIDEO."""
    params: frozenset[str]
    """Fields of `OmniDiffusionSamplingParams` this model understands besides `n`, `seed`, `height`,
    `width`, `num_inference_steps` and `quality`; a request that sets another one is refused."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of fields that a request leaves unset (`num_inference_steps` must be among them).
    Without `height` and `width` the pipeline takes the size from the input image."""
    size_multiple: int = 16
    """Height and width must be multiples of it."""
    max_pixels: int = 2048 * 2048
    """Most pixels of one frame."""
    max_frames: int = 1
    frames_multiple: int = 1
    """`num_frames - 1` must be a multiple of it (4 for Wan)."""
    min_steps: int = 1
    max_steps: int = 1000
    min_images: int = 0
    """Input images a request must bring; 1 for edit models and image to video."""
    max_images: int = 0
    takes_mask: bool = False
    needs_mask: bool = False
    """A request must bring one."""
    has_step_progress: bool = True
    has_preview: bool = False
    """`preview` gives an image of unfinished latents."""
    loads_lora: bool = False
    """`PipelineComponents.lora_loader` is there."""
    self_test: Mapping[str, object] = field(default_factory=dict)
    """Fields of the `DiffusionRequest` with which a replica tests itself, where the small picture
    that the engine would ask for does not do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineContext:
    """What a replica gives its pipeline when it loads."""

    model_dir: Path
    device: str
    """`cpu` or `cuda:0`."""
    dtype: torch.dtype
    """Of denoiser and text encoders; a VAE that needs more precision says so itself."""
    weights_on_host: bool = False
    """The modules stay on the CPU when they are loaded: they are brought to the device in parts."""
    load_format: str = "auto"
    """`auto`: the folder's weights. `dummy`: random weights of the configured shapes."""
    ranks: Ranks = field(default_factory=OneRank)
    """Those that take denoise steps together; this process is one of them."""


@dataclass(slots=True, kw_only=True)
class PipelineComponents:
    """Modules that accelerations are attached to from outside."""

    denoisers: Mapping[str, torch.nn.Module]
    """By component name (`transformer`, `transformer_2`), each a diffusers `ModelMixin`."""
    vae: torch.nn.Module | None = None
    encoders: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    """Text and image encoders by component name."""
    lora_loader: object | None = None
    """A diffusers pipeline with `load_lora_weights` and `set_adapters`."""


@dataclass(slots=True, eq=False)
class DenoiseState:
    """One item between `prepare` and `decode`; families subclass it with what they need."""

    request: DiffusionRequest
    latents: torch.Tensor
    """The item's own, batch dimension 1."""
    num_steps: int
    """Steps this item takes: after `strength` and with the schedule's own extra steps."""
    step_index: int = 0
    """Steps taken so far."""

    @property
    def is_done(self) -> bool:
        return self.step_index >= self.num_steps


class StepPipeline(Protocol):
    """A pipeline cut at its denoise step (`ExecutionMode.STEP`)."""

    shares_rows: ClassVar[bool]
    """`denoise_step` leaves other ranks their share of the rows; else a replica has one device."""
    capabilities: Capabilities
    components: PipelineComponents

    def __init__(self, context: PipelineContext) -> None:
        """Load. Raises ConfigError or OSError with one clear line."""

    def prepare_for_compiler(self) -> None:
        """Called once where the denoisers' blocks will be compiled: put what the compiler takes in
        place of what it would leave to single kernels. Results may differ by rounding."""

    def look_modulations_up(self, max_batch_size: int, max_prepared: int) -> bool:
        """Called once, where weights stay on the device: have the blocks' modulations computed for
        many steps at once. False: the model's cannot be."""

    def conditioning_key(self, request: DiffusionRequest) -> Hashable:
        """Everything `encode` reads of a request: equal keys mean equal conditioning. Texts as they
        are, images by a cryptographic digest."""

    def encode(self, requests: Sequence[DiffusionRequest]) -> Sequence[object]:
        """Conditioning of each request (embeddings, image latents): never changed afterwards, since
        it is cached and shared. Equal to encoding each alone."""

    def conditioning_bytes(self, conditioning: object) -> int:
        """Device memory it holds, for the cache's bound (`diffusion.conditioning.tensor_bytes`)."""

    def prepare(self, request: DiffusionRequest, conditioning: object) -> DenoiseState:
        """Initial noise from the request's own generator, and its own noise schedule: a deep copy
        or new object of the diffusers scheduler, never the shared one."""

    def batch_key(self, state: DenoiseState) -> Hashable:
        """States with equal keys may share a forward: shape, dtype, guidance kind, quality,
        conditioning shape where it is not padded. The engine adds the LoRA."""

    def denoise_step(self, states: Sequence[DenoiseState]) -> None:
        """One forward for members at different timesteps; then each takes its own schedule's step.
        When it raises, no state has changed: the engine runs it once more, for fewer members.
        Does not wait for the device. With several ranks it raises on all of them or on none."""

    def decode(self, states: Sequence[DenoiseState]) -> Sequence[NDArray[np.uint8]]:
        """The media of each finished state: [height, width, 3] or [frames, height, width, 3]."""

    def preview(self, state: DenoiseState) -> NDArray[np.uint8] | None:
        """A small image of unfinished latents; None when there is no cheap one. `state` is a
        snapshot: its latents may be read while the request's next step runs."""


ReportStep = Callable[[int, int], bool]
"""Steps done and steps in all; answers whether to go on. False: stop at once, nobody waits."""


class RequestPipeline(Protocol):
    """A pipeline that runs whole requests (`ExecutionMode.REQUEST`)."""

    shares_rows: ClassVar[bool]
    """As of `StepPipeline`."""
    capabilities: Capabilities
    components: PipelineComponents

    def __init__(self, context: PipelineContext) -> None:
        """Load. Raises ConfigError or OSError with one clear line."""

    def run(self, request: DiffusionRequest, report: ReportStep) -> NDArray[np.uint8] | None:
        """The media of one request; None when `report` said to stop."""
