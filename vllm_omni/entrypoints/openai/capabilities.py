"""What the served pipeline reads, writes and speaks: one answer for checks and for /v1/models."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_omni.config.deploy import ResolvedConfig, ResolvedStage
from vllm_omni.config.pipeline import Modality, PipelineConfig, Task
from vllm_omni.diffusion.checks import load_capabilities
from vllm_omni.diffusion.models.interface import Capabilities as DiffusionCapabilities
from vllm_omni.errors import BadRequestError, ConfigError


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Derived once from the resolved configuration."""

    pipeline: PipelineConfig
    voices: tuple[str, ...]
    diffusion: DiffusionCapabilities | None = None
    """Of the stage that makes pictures or videos."""

    @classmethod
    def of(cls, config: ResolvedConfig) -> Capabilities:
        return cls(
            config.pipeline,
            _load_voices(config.pipeline, config.model_dir),
            _load_diffusion(config.stages),
        )

    @property
    def tasks(self) -> tuple[Task, ...]:
        return tuple(sorted(self.pipeline.entries))

    @property
    def chat_inputs(self) -> frozenset[Modality]:
        """Modalities a chat prompt may bring."""
        return frozenset({Modality.TEXT}) | self.native_inputs | frozenset(self._edge_inputs())

    @property
    def inputs(self) -> frozenset[Modality]:
        """Modalities that any request may bring."""
        found = set(self.chat_inputs)
        if self.diffusion is not None and self.diffusion.max_images:
            found.add(Modality.IMAGE)
        if Task.TRANSCRIPTION in self.pipeline.entries:
            found.add(Modality.AUDIO)
        return frozenset(found)

    @property
    def native_inputs(self) -> frozenset[Modality]:
        """Media that the prompt-reading stage reads by itself: its parts pass through to vLLM."""
        if Task.CHAT not in self.pipeline.entries:
            return frozenset()
        name = self.pipeline.entries[Task.CHAT]
        return self.pipeline.stages[self.pipeline.stage_id(name)].accepts

    @property
    def outputs(self) -> frozenset[Modality]:
        return frozenset(stage.emits for stage in self.pipeline.stages if stage.emits)

    def check_outputs(self, names: Iterable[str] | None) -> frozenset[Modality]:
        """`modalities` of a request; text alone when it names none."""
        if names is None:
            return frozenset({Modality.TEXT})
        wanted = set()
        for name in names:
            if name not in self.outputs:
                raise self.pipeline.does_not_write(name)
            wanted.add(Modality(name))
        if not wanted:
            raise BadRequestError("modalities must not be empty", field="modalities")
        return frozenset(wanted)

    def check_voice(self, name: str, field: str) -> str:
        """The voice of that name as the checkpoint writes it, whatever its case."""
        for voice in self.voices:
            if voice.lower() == name.lower():
                return voice
        known = ", ".join(self.voices) or "none"
        raise BadRequestError(f"voice {name!r} is not known; known voices: {known}", field=field)

    def _edge_inputs(self) -> Iterable[Modality]:
        target = self.pipeline.entries.get(Task.CHAT)
        for edge in self.pipeline.edges:
            if edge.target == target:
                yield from edge.when


def _load_diffusion(stages: Iterable[ResolvedStage]) -> DiffusionCapabilities | None:
    """By the family's own function."""
    for stage in stages:
        if stage.config.capabilities is not None:
            return load_capabilities(stage.config.capabilities, stage.model_dir, stage.config.name)
    return None


def _load_voices(pipeline: PipelineConfig, model_dir: Path) -> tuple[str, ...]:
    """Voice names of the checkpoint, by the family's own function."""
    if pipeline.voices is None:
        return ()
    module, _, name = pipeline.voices.partition(":")
    voices = tuple(getattr(importlib.import_module(module), name)(model_dir))
    if not voices:
        raise ConfigError(f"{model_dir}: the checkpoint has no voice")
    return voices
