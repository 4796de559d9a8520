"""Two families that exist only in tests, with stages that obey `orders`: the small speaking
assistant, and a painter.

They reach a server as any family of another package does: by entry points, here of a package
that `write_plugin` lays out in a folder for PYTHONPATH.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Final

from vllm_omni.config.pipeline import StageConfig, StageKind
from vllm_omni.config.registry import ENTRY_POINT_GROUP
from vllm_omni.diffusion.models.flux.pipeline import PIPELINE as IMAGE
from vllm_omni.diffusion.models.flux.tiny import make_tiny as make_tiny_painter
from vllm_omni.model_executor.models.smol_voice.pipeline import PIPELINE as SOUND
from vllm_omni.model_executor.models.smol_voice.tiny import make_tiny

_HERE: Final = __name__.rpartition(".")[0]
MODEL_TYPE: Final = "test_faulty_voice"
PAINTER: Final = "TestFaultyPainter"
"""Class in the model_index.json."""


def _faulty(stage: StageConfig) -> StageConfig:
    if stage.kind is StageKind.DIFFUSION:
        return dataclasses.replace(stage, model_class=f"{_HERE}.faulty_painter:FaultyPainter")
    if stage.kind is StageKind.ONE_SHOT:
        return dataclasses.replace(stage, model_class=f"{_HERE}.faulty_voice:FaultyVoice")
    engine = {**stage.engine_defaults, "worker_cls": f"{_HERE}.faulty_worker.FaultyWorker"}
    return dataclasses.replace(stage, engine_defaults=engine)


PIPELINE: Final = dataclasses.replace(
    SOUND, model_type=MODEL_TYPE, stages=tuple(map(_faulty, SOUND.stages))
)
PAINTER_PIPELINE: Final = dataclasses.replace(
    IMAGE, model_type=PAINTER, stages=tuple(map(_faulty, IMAGE.stages))
)


def write_plugin(folder: Path) -> Path:
    """A folder for PYTHONPATH in which these families are installed."""
    info = folder / "test_faulty_voice-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test-faulty-voice\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\n{MODEL_TYPE} = {__name__}:PIPELINE\n"
        f"{PAINTER} = {__name__}:PAINTER_PIPELINE\n"
    )
    return folder


def write_model(folder: Path) -> Path:
    """A tiny checkpoint of the speaking family."""
    make_tiny(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": MODEL_TYPE}))
    return folder


def write_painter(folder: Path) -> Path:
    """A tiny checkpoint of the painting family."""
    make_tiny_painter(folder, variant="schnell")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": PAINTER}))
    return folder
