"""What the families have in common: one forward for requests at different timesteps.

A family gives the reference's arguments for one request and the call of its denoiser; here they
become rows of a batch, guidance is applied per request, and each request's own noise schedule
takes its step. The reference pipeline's object holds the modules and encodes prompts.

B rows of a step: the conditional ones of all members, then the unconditional ones. The ranks of
the replica share them out; those of one rank take one forward, or several where `parts` says so.
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers.models.cache_utils import CacheMixin

from vllm_omni.diffusion.accelerations.modulation import Modulations, Table, Tables, Wanted
from vllm_omni.diffusion.models.interface import (
    Capabilities,
    DenoiseState,
    PipelineComponents,
    PipelineContext,
)
from vllm_omni.diffusion.models.loading import DENOISERS, load_reference, modules_of
from vllm_omni.diffusion.models.schedules import fork
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.errors import BadRequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Row = Mapping[str, torch.Tensor]
"""Arguments of the denoiser that one row brings, each with batch dimension 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Conditioning:
    """What the denoiser gets besides latents and time, for the request and against it."""

    positive: Row
    negative: Row | None = None
    """None: no classifier-free guidance."""


@dataclass(slots=True, eq=False, kw_only=True)
class StepState(DenoiseState):
    """A request between its denoise steps."""

    conditioning: Conditioning
    schedule: Any
    """The request's own diffusers scheduler, with its timesteps and sigmas."""
    height: int
    """Pixels."""
    width: int
    guidance_scale: float = 1.0
    """Of classifier-free guidance."""
    prediction: torch.Tensor | None = None
    """The last one, for previews."""
    modulations: Tables = field(default_factory=dict)
    """Of its steps to come."""

    @property
    def is_guided(self) -> bool:
        return self.conditioning.negative is not None

    @property
    def timestep(self) -> torch.Tensor:
        """Of the next step: a scalar on the device."""
        return self.schedule.timesteps[self.step_index]


class StepwisePipeline(ABC):
    """Base of the families' pipelines; implements `StepPipeline`."""

    shares_rows: ClassVar[bool] = True
    reference_class: ClassVar[str]
    """Class of diffusers whose modules and encoders are used."""
    component_dtypes: ClassVar[Mapping[str, torch.dtype]] = {}
    max_text_tokens: ClassVar[int] = 512
    unused_components: ClassVar[tuple[str, ...]] = ()
    """Parts of the checkpoint that are not loaded."""
    modulation_reads_text: ClassVar[bool] = False
    """The blocks' modulations depend on more of a row than its timestep."""

    def __init__(self, context: PipelineContext) -> None:
        self.capabilities = self.describe(context)
        self.reference = load_reference(
            context, self.reference_class, self.component_dtypes, self.unused_components
        )
        modules = modules_of(self.reference)
        self.components = PipelineComponents(
            denoisers={name: modules[name] for name in DENOISERS if name in modules},
            vae=modules.get("vae"),
            encoders={n: m for n, m in modules.items() if n not in (*DENOISERS, "vae")},
            lora_loader=self.reference if self.capabilities.loads_lora else None,
        )
        self.device = torch.device(context.device)
        self.dtype = context.dtype
        self.ranks = context.ranks
        self.modulations: Modulations | None = None

    @staticmethod
    @abstractmethod
    def describe(context: PipelineContext) -> Capabilities:
        """What the checkpoint can do."""

    @abstractmethod
    def encode_one(self, request: DiffusionRequest) -> Conditioning:
        """Run the encoders for one request."""

    @abstractmethod
    def noise(self, request: DiffusionRequest, height: int, width: int) -> torch.Tensor:
        """The latents to begin with, from the request's own generator."""

    @abstractmethod
    def schedule(self, request: DiffusionRequest, latents: torch.Tensor) -> Any:
        """A noise schedule of the request's own; see `new_schedule`."""

    @abstractmethod
    def forward(
        self, states: Sequence[Any], latents: torch.Tensor, timesteps: torch.Tensor, rows: list[Row]
    ) -> Sequence[torch.Tensor]:
        """Call the denoiser; returns the prediction of each row, batch dimension 1.

        `states` are those that the rows belong to, one for each row.
        """

    @abstractmethod
    def decode_latents(self, state: Any, latents: torch.Tensor) -> torch.Tensor:
        """Latents to pixels in [-1, 1]: [3, height, width] or [3, frames, height, width]."""

    def prepare_for_compiler(self) -> None:  # noqa: B027 - nothing is an answer
        """Nothing, where the reference's blocks compile well."""

    def time_embedder(self) -> torch.nn.Module | None:
        """What makes the embedding that every block projects to its modulations; None: they are
        not to be looked up."""
        return None

    def embed_time(self, state: Any, row: Row, timesteps: torch.Tensor) -> torch.Tensor:
        """What `time_embedder` makes of timesteps [S] in a forward of this row: [S, D]."""
        raise NotImplementedError

    def look_modulations_up(self, max_batch_size: int, max_prepared: int) -> bool:
        """Have the modulations of many steps computed at once; whether the model can."""
        embedder = self.time_embedder()
        if embedder is None:
            return False
        [denoiser] = self.components.denoisers.values()
        self.modulations = Modulations(
            denoiser,
            embedder,
            max_rows=2 * max_batch_size,
            max_tables=max_prepared * (2 if self.modulation_reads_text else 1),
        )
        return True

    def text_length_of(self, request: DiffusionRequest) -> int:
        """Most tokens of a text that the encoder keeps.

        Raises:
            BadRequestError: more than the model takes.
        """
        asked = request.max_sequence_length
        if asked is not None and asked > self.max_text_tokens:
            raise BadRequestError(
                f"max_sequence_length must be at most {self.max_text_tokens}, got {asked}",
                field="max_sequence_length",
            )
        return asked if asked is not None else self.max_text_tokens

    def scale_of(self, request: DiffusionRequest) -> float:
        """Scale of classifier-free guidance."""
        return request.guidance_scale or 1.0

    def size_of(self, request: DiffusionRequest) -> tuple[int, int]:
        """Height and width in pixels of what comes out."""
        assert request.height is not None, "the capabilities have a default"
        assert request.width is not None, "the capabilities have a default"
        return request.height, request.width

    def prepare(self, request: DiffusionRequest, conditioning: object) -> StepState:
        """Own latents and own noise schedule."""
        assert isinstance(conditioning, Conditioning)
        height, width = self.size_of(request)
        latents = self.noise(request, height, width)
        schedule = self.schedule(request, latents)
        return StepState(
            request=request,
            latents=latents,
            num_steps=len(schedule.timesteps),
            conditioning=conditioning,
            schedule=schedule,
            height=height,
            width=width,
            guidance_scale=self.scale_of(request),
        )

    def texts(self, request: DiffusionRequest) -> tuple[Hashable, ...]:
        """What the encoders read of the request's texts."""
        negative = request.negative_prompt if self.is_guided(request) else None
        return request.prompt, self.is_guided(request), negative, request.max_sequence_length

    @abstractmethod
    def is_guided(self, request: DiffusionRequest) -> bool:
        """Whether classifier-free guidance applies."""

    def guide(self, state: Any, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        """Classifier-free guidance, computed as the reference does."""
        return negative + state.guidance_scale * (positive - negative)

    def model_input(self, state: Any) -> torch.Tensor:
        """The denoiser's input for this state's row."""
        return state.latents

    def final_latents(self, state: Any) -> torch.Tensor:
        """Latents of a finished state as the decoder gets them."""
        return state.latents

    def conditioning_key(self, request: DiffusionRequest) -> Hashable:
        """Texts as they are, images by their digest."""
        return self.texts(request), tuple(map(image_digest, request.images))

    def encode(self, requests: Sequence[DiffusionRequest]) -> Sequence[Conditioning]:
        """One by one: padding to the longest would change what the encoders say."""
        return [self.encode_one(request) for request in requests]

    def conditioning_bytes(self, conditioning: object) -> int:
        """Device memory of one conditioning; both rows count once where they share a tensor."""
        assert isinstance(conditioning, Conditioning)
        tensors = {
            id(tensor): tensor
            for row in (conditioning.positive, conditioning.negative or {})
            for tensor in row.values()
        }
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def batch_key(self, state: DenoiseState) -> Hashable:
        """Shape, guidance and quality; conditioning is padded, or has one length."""
        assert isinstance(state, StepState)
        return (
            tuple(state.latents.shape),
            state.latents.dtype,
            state.is_guided,
            state.request.quality,
        )

    def denoise_step(self, states: Sequence[Any]) -> None:
        """The forwards for all; then each state takes the step of its own schedule."""
        advance(states, self.ranks.all_or_none(lambda: moved(states, self.predict(states))))

    def predict(self, states: Sequence[Any]) -> Sequence[torch.Tensor]:
        """The guided prediction for each state's schedule."""
        positives = [state.conditioning.positive for state in states]
        if not states[0].is_guided:
            return self._forwards(states, positives)
        negatives = [state.conditioning.negative for state in states]
        outputs = self._forwards([*states, *states], positives + negatives)
        return [
            self.guide(state, positive, negative)
            for state, positive, negative in zip(
                states, outputs[: len(states)], outputs[len(states) :], strict=True
            )
        ]

    def parts(self, states: Sequence[Any], rows: list[Row]) -> Sequence[Sequence[int]]:
        """Which rows take a forward together, by their indices; all do unless told otherwise."""
        return [range(len(rows))]

    def _forwards(self, states: Sequence[Any], rows: list[Row]) -> list[torch.Tensor]:
        """The prediction of each row; `states` has the one that it belongs to."""
        return self.ranks.share_rows(
            len(rows),
            lambda mine: self._compute([states[i] for i in mine], [rows[i] for i in mine]),
        )

    def _compute(self, states: Sequence[Any], rows: list[Row]) -> list[torch.Tensor]:
        """The rows of this rank."""
        inputs = {id(state): self.model_input(state) for state in states}
        outputs: dict[int, torch.Tensor] = {}
        for number, part in enumerate(self.parts(states, rows)):
            members = [states[i] for i in part]
            part_rows = [rows[i] for i in part]
            with self._remembering(f"part {number}"), self._modulated(members, part_rows):
                predictions = self.forward(
                    members,
                    torch.cat([inputs[id(state)] for state in members]),
                    torch.stack([state.timestep for state in members]),
                    part_rows,
                )
            outputs |= zip(part, predictions, strict=True)
        return [outputs[i] for i in range(len(rows))]

    def _modulated(
        self, states: Sequence[Any], rows: list[Row]
    ) -> contextlib.AbstractContextManager[None]:
        """The forward within is that of these rows."""
        if self.modulations is None:
            return contextlib.nullcontext()
        wanted = [self._wanted(*pair) for pair in zip(states, rows, strict=True)]
        return self.modulations.announced(wanted)

    def _wanted(self, state: StepState, row: Row) -> Wanted:
        key = self.modulation_reads_text and row is state.conditioning.negative
        return Wanted(
            state.modulations.setdefault(key, Table()),
            state.step_index,
            state.num_steps,
            lambda start, end: self.embed_time(state, row, state.schedule.timesteps[start:end]),
        )

    @contextlib.contextmanager
    def _remembering(self, name: str) -> Iterator[None]:
        """Under which name a step cache remembers this forward until the next step."""
        with contextlib.ExitStack() as stack:
            for module in self.components.denoisers.values():
                if isinstance(module, CacheMixin):
                    stack.enter_context(module.cache_context(name))
            yield

    def decode(self, states: Sequence[Any]) -> Sequence[NDArray[np.uint8]]:
        """Each alone: the VAE takes most of its memory per picture."""
        return [to_uint8(self.decode_latents(state, self.final_latents(state))) for state in states]

    def preview(self, state: DenoiseState) -> NDArray[np.uint8] | None:
        """The end of the flow as the last prediction sees it."""
        assert isinstance(state, StepState)
        if not self.capabilities.has_preview or state.prediction is None:
            return None
        sigma = state.schedule.sigmas[state.step_index]
        return to_uint8(self.decode_latents(state, state.latents - sigma * state.prediction))

    def new_generator(self, request: DiffusionRequest) -> torch.Generator:
        """On the CPU, so that a seed means the same picture on every device."""
        return torch.Generator("cpu").manual_seed(request.seed)


def grouped(keys: Iterable[Hashable]) -> list[list[int]]:
    """Indices of equal keys together, in the order in which the keys come."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


Moved = Sequence[tuple[Any, torch.Tensor, torch.Tensor]]
"""Of each state: its schedule and latents after a step, and the prediction that led there."""


def moved(states: Sequence[StepState], predictions: Sequence[torch.Tensor]) -> Moved:
    """Where each state's own schedule takes it; no state has moved yet."""
    after = []
    for state, prediction in zip(states, predictions, strict=True):
        schedule = fork(state.schedule)
        (latents,) = schedule.step(prediction, state.timestep, state.latents, return_dict=False)
        after.append((schedule, latents, prediction))
    return after


def advance(states: Sequence[StepState], after: Moved) -> None:
    """Every state takes its step."""
    for state, (schedule, latents, prediction) in zip(states, after, strict=True):
        state.schedule, state.latents, state.prediction = schedule, latents, prediction
        state.step_index += 1
        if state.is_done:
            state.modulations.clear()  # it waits for its decoding


def image_digest(image: NDArray[np.uint8]) -> Hashable:
    """Equal for equal pictures."""
    return image.shape, hashlib.sha256(image.tobytes()).digest()


def to_uint8(pixels: torch.Tensor) -> NDArray[np.uint8]:
    """[3, ..., height, width] in [-1, 1] to [..., height, width, 3]; rounds as diffusers does."""
    unit = (pixels * 0.5 + 0.5).clamp(0, 1).movedim(0, -1).float()
    return (unit * 255).round().to(torch.uint8).cpu().numpy()


def scaled_for_kl(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents of the denoiser to those of a KL autoencoder."""
    return (latents / vae.config.scaling_factor) + vae.config.shift_factor


def latent_statistics(vae: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and inverse standard deviation of a video autoencoder's latents, as the reference
    computes them."""
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents.device, latents.dtype)
    std = torch.tensor(vae.config.latents_std).view(shape)
    return mean, 1.0 / std.to(latents.device, latents.dtype)
