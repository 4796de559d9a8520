"""The small speaking assistant with stages that obey `orders`: a family that exists only in tests.

It reaches a server as any family of another package does: by an entry point, here of a package
that `write_plugin` lays out in a folder for PYTHONPATH.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Final

from vllm_omni.config.pipeline import StageConfig, StageKind
from vllm_omni.config.registry import ENTRY_POINT_GROUP
from vllm_omni.model_executor.models.smol_voice.pipeline import PIPELINE as SOUND
from vllm_omni.model_executor.models.smol_voice.tiny import make_tiny

_HERE: Final = __name__.rpartition(".")[0]
MODEL_TYPE: Final = "test_faulty_voice"


def _faulty(stage: StageConfig) -> StageConfig:
    if stage.kind is StageKind.ONE_SHOT:
        return dataclasses.replace(stage, model_class=f"{_HERE}.faulty_voice:FaultyVoice")
    engine = {**stage.engine_defaults, "worker_cls": f"{_HERE}.faulty_worker.FaultyWorker"}
    return dataclasses.replace(stage, engine_defaults=engine)


PIPELINE: Final = dataclasses.replace(
    SOUND, model_type=MODEL_TYPE, stages=tuple(map(_faulty, SOUND.stages))
)


def write_plugin(folder: Path) -> Path:
    """A folder for PYTHONPATH in which this family is installed."""
    info = folder / "test_faulty_voice-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test-faulty-voice\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\n{MODEL_TYPE} = {__name__}:PIPELINE\n"
    )
    return folder


def write_model(folder: Path) -> Path:
    """A tiny checkpoint of this family."""
    make_tiny(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": MODEL_TYPE}))
    return folder
