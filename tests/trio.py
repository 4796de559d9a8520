"""A model of three stages that exists only here, and a host to place it on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vllm_omni.config.pipeline import Edge, Modality, PipelineConfig, StageConfig, StageKind, Task
from vllm_omni.platforms import Device

PIPELINE = PipelineConfig(
    model_type="test_trio",
    stages=(
        StageConfig(
            name="ears",
            kind=StageKind.AUTOREGRESSIVE,
            model_subfolder="ears",
            engine_defaults={"max_model_len": 448, "kv_cache_memory_bytes": 1 << 26},
        ),
        StageConfig(
            name="mind",
            kind=StageKind.AUTOREGRESSIVE,
            model_subfolder="mind",
            accepts=frozenset({Modality.TEXT}),
            emits=Modality.TEXT,
            engine_defaults={"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 28},
        ),
        StageConfig(
            name="mouth",
            kind=StageKind.ONE_SHOT,
            model_subfolder="mouth",
            emits=Modality.AUDIO,
            engine_defaults={"first_clause_words": 3, "gain": 1.0},
        ),
    ),
    edges=(
        Edge(source="ears", target="mind", bridge="x:y", when=frozenset({Modality.AUDIO})),
        Edge(source="mind", target="mouth", bridge="x:y", streams=True),
    ),
    entries={Task.CHAT: "mind", Task.SPEECH: "mouth", Task.TRANSCRIPTION: "ears"},
)


@dataclass(frozen=True)
class FakePlatform:
    """A host with the given devices and sixteen cores."""

    device_type: str = "cpu"
    memory: tuple[tuple[str, int], ...] = (("cpu", 24 << 30),)

    def devices(self) -> tuple[Device, ...]:
        return tuple(Device(name, size) for name, size in self.memory)

    def child_env(self, devices: tuple[str, ...]) -> dict[str, str]:
        return {}

    def yielding_env(self) -> dict[str, str]:
        return {}

    def default_devices(self, replica: int, world_size: int) -> tuple[str, ...]:
        names = [name for name, _ in self.memory]
        first = replica * world_size % len(names)
        return tuple(names[first : first + world_size])

    def default_num_threads(self, num_replicas: int) -> int:
        return 16 // num_replicas

    def prepare_process(self) -> None:
        pass


GPUS = FakePlatform("cuda", (("cuda:0", 80 << 30), ("cuda:1", 80 << 30)))
ONE_GPU = FakePlatform("cuda", (("cuda:0", 80 << 30),))


def write_model(folder: Path) -> Path:
    """A checkpoint of `PIPELINE` that is complete, with weights of one byte."""
    (folder / "config.json").write_text(json.dumps({"model_type": "test_trio"}))
    for stage in PIPELINE.stages:
        part = folder / stage.model_subfolder
        part.mkdir()
        if stage.kind is StageKind.AUTOREGRESSIVE:
            (part / "config.json").write_text("{}")
        (part / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    return folder
