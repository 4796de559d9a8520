"""What a pipeline is: frozen data that a model family writes in its `pipeline.py`.

Nothing here says where a stage runs (that is `deploy.py`) and nothing names a model.
Read in every process; imports neither torch nor vLLM.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from vllm_omni.errors import UnsupportedModalityError


class StageKind(enum.StrEnum):
    """Which engine runs a stage."""

    AUTOREGRESSIVE = "autoregressive"
    """vLLM's engine core: tokens, KV cache, continuous batching."""
    ONE_SHOT = "one_shot"
    """Our light engine: whole outputs in one forward, streaming state per request."""
    DIFFUSION = "diffusion"
    """Our diffusion engine: batches by the denoise step."""


class Modality(enum.StrEnum):
    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


class Task(enum.StrEnum):
    """What a request asks of the pipeline; decides its entry stage."""

    CHAT = "chat"
    """Prompt (text, perhaps with media) in, any of the pipeline's modalities out."""
    SPEECH = "speech"
    """Text in, the same text spoken."""
    TRANSCRIPTION = "transcription"
    """Speech in, the same words as text."""
    IMAGE = "image"
    """Text in, perhaps with pictures, a picture out."""
    VIDEO = "video"
    """Text in, perhaps with a picture, a video out."""


MADE_BY: Final[Mapping[Task, Modality]] = {Task.IMAGE: Modality.IMAGE, Task.VIDEO: Modality.VIDEO}
"""Tasks that end in the stage which emits this; its params are the request's own."""


class CaptureScope(enum.StrEnum):
    """Which positions of a request a stage's captured rows are taken from."""

    MEDIA = "media"
    """Those that images, audio and video fill in the prompt."""
    ALL = "all"
    """Every position of the prompt and every token that is written."""


LAST_HIDDEN: Final = -1
"""A layer to capture: what the forward returns, after the last norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Rows of the source's forward that a streaming edge carries beside the token ids."""

    layers: tuple[int | str, ...]
    """0: input of the first layer; k: output of layer k-1; LAST_HIDDEN. A dotted name is read from
    the checkpoint's config.json."""
    scope: CaptureScope = CaptureScope.ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """What one stage of a model is. Where and how it runs is `StageDeploy`."""

    name: str
    kind: StageKind
    model_subfolder: str = ""
    """Folder of this stage's own checkpoint inside the model folder; empty for the root."""
    accepts: frozenset[Modality] = frozenset()
    """Modalities that a client's request may bring to this stage directly."""
    emits: Modality | None = None
    """Modality sent to the client, or None when only other stages read it."""
    model_class: str | None = None
    """`module:Class` of the model for ONE_SHOT and DIFFUSION; vLLM resolves AUTOREGRESSIVE."""
    hf_config: str | None = None
    """`module:function` that makes this AUTOREGRESSIVE stage's config out of the checkpoint's; None
    where vLLM reads the checkpoint's own."""
    speaks: bool = False
    """Takes the voice and the seed that a request names for its speech."""
    capabilities: str | None = None
    """`module:function` from model folder to `Capabilities`, for DIFFUSION; imports no torch."""
    engine_defaults: Mapping[str, object] = field(default_factory=dict)
    """Engine options the model needs (for AUTOREGRESSIVE vLLM's own argument names)."""
    default_params: Mapping[str, object] = field(default_factory=dict)
    """Sampling params a request gets unless it says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One stage feeds another."""

    source: str
    target: str
    bridge: str
    """`module:name`. With `streams` a `StreamBridge` factory that runs in the target's replica;
    without, a `PromptBridge` that turns finished upstream outputs into the target's prompt."""
    streams: bool = False
    """The target starts while the source still writes; chunks go from replica to replica."""
    capture: Capture | None = None
    """For a streaming edge between AUTOREGRESSIVE stages: the target is conditioned on the source's
    prompt, tokens and these rows, and `bridge` names a `ConditioningBridge` factory."""
    when: frozenset[Modality] = frozenset()
    """Only taken when the request brings one of these modalities; empty: always."""


@dataclass(frozen=True, slots=True)
class Route:
    """The stages one request needs, as stage ids in topological order."""

    stages: tuple[int, ...]
    entry: int
    emitting: frozenset[int]
    """Stages whose outputs go to the client."""
    edges: tuple[Edge, ...]
    """The edges between those stages."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineConfig:
    """The stages of a model and how they feed each other. A stage id is an index into `stages`."""

    model_type: str
    """`model_type` of the checkpoint's config.json."""
    stages: tuple[StageConfig, ...]
    edges: tuple[Edge, ...] = ()
    entries: Mapping[Task, str]
    """The stage that does a task. For IMAGE and VIDEO the one that reads the prompt: that which
    makes the picture, or one that feeds it. For CHAT it is the stage that reads the prompt: its
    tokenizer, chat template and model config serve the text API."""
    placeholders: Mapping[Modality, str] = field(default_factory=dict)
    """Text that stands in a prompt where one media item goes, for media that an upstream stage
    turns into text. Refused inside the client's own text."""
    entry_prompt: str | None = None
    """`module:function`, an `EntryPrompt`: for a text stage that writes for a stage which makes
    pictures or videos."""
    voices: str | None = None
    """`module:function` from model folder to voice names; None: the pipeline does not speak."""
    absent: Mapping[Modality, str] = field(default_factory=dict)
    """Why this checkpoint does not write a modality that others of its family do."""
    deploy_name: str = ""
    """Name of the shipped deploy YAMLs; empty: `model_type`."""

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"pipeline {self.model_type!r}: stage names repeat: {names}")
        order = {name: i for i, name in enumerate(names)}
        for edge in self.edges:
            for name in (edge.source, edge.target):
                if name not in order:
                    raise ValueError(f"pipeline {self.model_type!r}: no stage {name!r}")
            if order[edge.source] >= order[edge.target]:
                raise ValueError(
                    f"pipeline {self.model_type!r}: stage {edge.source!r} must stand before "
                    f"{edge.target!r}"
                )
        for task, name in self.entries.items():
            if name not in order:
                raise ValueError(f"pipeline {self.model_type!r}: {task} needs stage {name!r}")

    @property
    def default_task(self) -> Task:
        """What a request does that names no task: chat, or else the first that there is."""
        return Task.CHAT if Task.CHAT in self.entries else next(iter(self.entries))

    def stage_id(self, name: str) -> int:
        """Index of the stage called `name`; KeyError when there is none."""
        for i, stage in enumerate(self.stages):
            if stage.name == name:
                return i
        raise KeyError(name)

    def does_not_write(self, name: str) -> UnsupportedModalityError:
        """The refusal of a modality of answers that no stage emits."""
        known = ", ".join(sorted({stage.emits for stage in self.stages if stage.emits}))
        reason = next((f": {why}" for what, why in self.absent.items() if what == name), "")
        return UnsupportedModalityError(
            f"this model does not write {name!r}{reason}; it writes {known}", field="modalities"
        )


@functools.lru_cache(maxsize=1024)
def plan_route(
    pipeline: PipelineConfig,
    task: Task,
    inputs: frozenset[Modality],
    outputs: frozenset[Modality],
) -> Route:
    """Choose the stages a request runs; only those that its inputs and outputs need.

    `inputs` are the modalities the request brings, `outputs` those it asks for.

    Raises:
        UnsupportedModalityError: the pipeline cannot do the task, read an input or write an output.
    """
    if task not in pipeline.entries:
        raise UnsupportedModalityError(f"this model does not do {task}", field="model")
    main = pipeline.stage_id(pipeline.entries[task])
    if task in MADE_BY:
        return _route_to(pipeline, main, MADE_BY[task])
    if task is not Task.CHAT:
        return Route(stages=(main,), entry=main, emitting=frozenset({main}), edges=())
    used = {main} | _upstream(pipeline, main, inputs)
    emitting = set()
    for modality in sorted(outputs):
        path = _path_to(pipeline, main, modality)
        if path is None:
            raise pipeline.does_not_write(modality)
        used |= set(path)
        emitting.add(path[-1])
    stages = tuple(sorted(used))
    names = {pipeline.stages[i].name for i in stages}
    edges = tuple(e for e in pipeline.edges if e.source in names and e.target in names)
    return Route(stages=stages, entry=stages[0], emitting=frozenset(emitting), edges=edges)


def _route_to(pipeline: PipelineConfig, entry: int, modality: Modality) -> Route:
    """From the stage that reads a prompt to the one that makes a picture or video of it."""
    path = _path_to(pipeline, entry, modality)
    if path is None:
        raise UnsupportedModalityError(f"this model does not write {modality}", field="model")
    names = {pipeline.stages[i].name for i in path}
    edges = tuple(e for e in pipeline.edges if e.source in names and e.target in names)
    return Route(tuple(sorted(path)), entry, frozenset({path[-1]}), edges)


def _upstream(pipeline: PipelineConfig, main: int, inputs: frozenset[Modality]) -> set[int]:
    """Stages that must run before `main` because of what the request brings."""
    target, found, readable = pipeline.stages[main], set(), set(pipeline.stages[main].accepts)
    for edge in pipeline.edges:
        if edge.target == target.name and edge.when & inputs:
            found.add(pipeline.stage_id(edge.source))
            readable |= edge.when
    for modality in sorted(inputs - readable):
        raise UnsupportedModalityError(
            f"this model does not read {modality}; it reads {', '.join(sorted(readable))}",
            field="messages",
        )
    return found


def _path_to(pipeline: PipelineConfig, main: int, modality: Modality) -> list[int] | None:
    """Shortest path of stage ids from `main` to a stage that emits `modality`."""
    paths = [[main]]
    for path in paths:
        stage = pipeline.stages[path[-1]]
        if stage.emits == modality:
            return path
        paths += [
            [*path, pipeline.stage_id(edge.target)]
            for edge in pipeline.edges
            if edge.source == stage.name
        ]
    return None
