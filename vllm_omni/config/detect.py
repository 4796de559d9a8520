"""From a model argument to a folder, its pipeline, and the certainty that its weights are there.

Reads only `config.json`, `model_index.json` and file sizes; every error is one line that says
what to do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vllm_omni.config.pipeline import PipelineConfig, StageConfig, StageKind
from vllm_omni.config.registry import ANY_DIFFUSERS, known_pipelines
from vllm_omni.errors import ConfigError

CONFIG_NAME: Final = "config.json"
INDEX_NAME: Final = "model_index.json"
"""A diffusers folder has it instead of a config.json."""
WEIGHT_SUFFIXES: Final = (".safetensors", ".onnx", ".bin", ".pt", ".pth", ".gguf")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LENGTH_BYTES: Final = 8
"""Of a safetensors file: how long its header is."""
_LFS_POINTER: Final = b"version https://git-lfs"
_LFS_POINTER_MAX_BYTES: Final = 1024


def locate(model: str, revision: str | None = None) -> Path:
    """The folder of `model`, a path or the name of a hub model.

    Of a hub model that is none of ours only the config.json is fetched: vLLM fetches the rest.

    Raises:
        ConfigError: there is no such folder, and no such model that can be fetched.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ConfigError(
            f"model {model!r} is a file; give the folder that has its {CONFIG_NAME} or {INDEX_NAME}"
        )
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"model folder {model!r} does not exist")
    return _hub_snapshot(model, revision)


def _hub_snapshot(repo_id: str, revision: str | None) -> Path:
    """The local snapshot of a hub model, fetched when it is not complete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        names = [CONFIG_NAME, INDEX_NAME]
        config = Path(snapshot_download(repo_id, revision=revision, allow_patterns=names))
        if detect(config) is None:
            return config
        return Path(snapshot_download(repo_id, revision=revision))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as exc:
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise ConfigError(
            f"model {repo_id!r} is neither a folder here nor available from the model hub: {reason}"
        ) from exc


def detect(model_dir: Path) -> str | None:
    """Name of the pipeline that serves this folder, its `model_type` or its diffusers class; None:
    serve it as plain vLLM does.

    Raises:
        ConfigError: the folder, its config.json or the JSON in it is missing or wrong.
    """
    if not model_dir.is_dir():
        raise ConfigError(f"model folder '{model_dir}' does not exist")
    if (model_dir / INDEX_NAME).is_file():
        name = _read(model_dir / INDEX_NAME).get("_class_name")
        if not isinstance(name, str):
            raise ConfigError(f"{model_dir / INDEX_NAME}: names no pipeline class")
        known = known_pipelines()
        return name if name in known or ANY_DIFFUSERS not in known else ANY_DIFFUSERS
    path = model_dir / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(f"model folder '{model_dir}' has no {CONFIG_NAME}")
    model_type = _read(path).get("model_type")
    return model_type if isinstance(model_type, str) and model_type in known_pipelines() else None


def _read(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{path}:{exc.lineno}: not JSON: {exc.msg}") from exc
    except RecursionError:
        raise ConfigError(f"{path}: nested too deep") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return config


def stage_dir(model_dir: Path, stage: StageConfig) -> Path:
    """Folder of one stage's own checkpoint."""
    return model_dir / stage.model_subfolder if stage.model_subfolder else model_dir


def check_weights(
    model_dir: Path, pipeline: PipelineConfig, without_weights: Iterable[str] = ()
) -> None:
    """Make sure every stage's checkpoint is complete before any process starts.

    `without_weights` names stages that load none (`load_format: dummy`).

    Raises:
        ConfigError: names the stage, the folder and what is missing there.
    """
    exempt = frozenset(without_weights)
    for stage in pipeline.stages:
        folder = stage_dir(model_dir, stage)
        if not folder.is_dir():
            raise ConfigError(f"stage {stage.name!r} has no folder '{folder}'")
        if stage.kind is StageKind.AUTOREGRESSIVE and not (folder / CONFIG_NAME).is_file():
            raise ConfigError(f"stage {stage.name!r} has no {CONFIG_NAME} in '{folder}'")
        if stage.name not in exempt:
            _check_stage_weights(stage.name, folder, stage.kind)


def _check_stage_weights(stage: str, folder: Path, kind: StageKind) -> None:
    # vLLM reads one flat folder; other engines may keep the parts of a model in subfolders.
    paths = folder.iterdir() if kind is StageKind.AUTOREGRESSIVE else folder.rglob("*")
    files = sorted(p for p in paths if p.suffix in WEIGHT_SUFFIXES and p.is_file())
    if not files:
        raise ConfigError(
            f"stage {stage!r} has no weights in '{folder}' "
            f"(looked for *{', *'.join(WEIGHT_SUFFIXES)})"
        )
    for path in files:
        size_bytes = path.stat().st_size
        if size_bytes == 0:
            raise ConfigError(f"stage {stage!r}: weights file '{path}' is empty")
        if size_bytes <= _LFS_POINTER_MAX_BYTES and path.read_bytes().startswith(_LFS_POINTER):
            raise ConfigError(
                f"stage {stage!r}: weights file '{path}' is a Git LFS pointer; run `git lfs pull`"
            )
        if path.suffix == ".safetensors" and not _is_whole(path, size_bytes):
            raise ConfigError(
                f"stage {stage!r}: weights file '{path}' is cut short or no safetensors file"
            )
    for index in sorted(folder.glob("*.index.json")):
        _check_shards(stage, index)


def _is_whole(path: Path, size_bytes: int) -> bool:
    """Whether a safetensors file has all the bytes that its header promises."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if num_bytes > size_bytes - _LENGTH_BYTES:
            return False
        try:
            tensors = json.loads(file.read(num_bytes))
            ends = [t["data_offsets"][1] for name, t in tensors.items() if name != "__metadata__"]
            return _LENGTH_BYTES + num_bytes + max(ends, default=0) <= size_bytes
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return False


def _check_shards(stage: str, index: Path) -> None:
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"stage {stage!r}: '{index}' is not a weights index") from exc
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        raise ConfigError(
            f"stage {stage!r} lacks {len(missing)} of {len(shards)} weights files in "
            f"'{index.parent}', first {missing[0]!r}"
        )
