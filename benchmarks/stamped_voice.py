"""A voice that says nothing but the time: the family that `audio_chunks` serves.

Every chunk is 0.64 s of silence whose first samples hold the moment at which it was ready, on the
clock that all processes of a machine share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vllm_omni.config.pipeline import Modality, PipelineConfig, StageConfig, StageKind, Task
from vllm_omni.config.registry import ENTRY_POINT_GROUP
from vllm_omni.generation.model import ModelContext, Work
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.outputs.media import AudioChunk

MODEL_TYPE: Final = "benchmark_stamped_voice"
SAMPLE_RATE_HZ: Final = 24_000
CHUNK_S: Final = 0.64
"""Eight frames of codes of a model with 12.5 frames a second."""
STEP_S: Final = 0.02
STAMP_BYTES: Final = 8


def stamp(pcm: bytes) -> int:
    """When a chunk was ready: nanoseconds of the monotonic clock."""
    return int.from_bytes(pcm[:STAMP_BYTES], "little")


class StampedVoice:
    """A `OneShotModel`: a chunk for each word. A step takes `step_s` seconds, as on a device."""

    def __init__(self, context: ModelContext) -> None:
        step_s = context.options.get("step_s", STEP_S)
        assert isinstance(step_s, float)
        self._step_s = step_s
        self._silence = bytes(2 * round(CHUNK_S * SAMPLE_RATE_HZ) - STAMP_BYTES)

    def self_test(self) -> None:
        self.forward([Work(None, "word", is_last=True)])

    def start(self, prompt: object, params: object) -> tuple[object, list[object]]:
        assert isinstance(prompt, OmniPrompt)
        assert prompt.text is not None
        return None, list(prompt.text.split())

    def forward(self, batch: Sequence[Work]) -> Sequence[AudioChunk | BaseException | None]:
        time.sleep(self._step_s)
        ready = time.monotonic_ns().to_bytes(STAMP_BYTES, "little")
        return [AudioChunk(ready + self._silence, SAMPLE_RATE_HZ) for _ in batch]

    def finish(self, state: object) -> None:
        pass


def voice_names(model_dir: Path) -> tuple[str, ...]:
    return ("default",)


PIPELINE: Final = PipelineConfig(
    model_type=MODEL_TYPE,
    stages=(
        StageConfig(
            name="voice",
            kind=StageKind.ONE_SHOT,
            accepts=frozenset({Modality.TEXT}),
            emits=Modality.AUDIO,
            model_class=f"{__name__}:StampedVoice",
        ),
    ),
    edges=(),
    entries={Task.SPEECH: "voice"},
    voices=f"{__name__}:voice_names",
)


def write_plugin(folder: Path) -> Path:
    """A folder for PYTHONPATH in which this family is installed."""
    info = folder / "benchmark_stamped_voice-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: benchmark-stamped-voice\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\n{MODEL_TYPE} = {__name__}:PIPELINE\n"
    )
    return folder


def write_model(folder: Path) -> Path:
    """A checkpoint: a stage without a file of weights is refused before its model is asked."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPE}))
    (folder / "none.bin").write_bytes(b"0")
    return folder
