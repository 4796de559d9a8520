"""The core names no model: a family is its folder, one line of the registry, a deploy file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

UPSTREAM_MODELS: Final = (
    "qwen", "llama", "smollm", "whisper", "piper", "gemma", "minicpm", "kokoro", "cosyvoice",
    "voxtral", "flux", "hunyuan", "stable_audio", "wan2", "glm_image",
)  # fmt: skip
"""Names that people give to models; a family's folder usually holds some of them."""

MODELS_DIR: Final = Path("vllm_omni/model_executor/models")
DIFFUSION_MODELS_DIR: Final = Path("vllm_omni/diffusion/models")
REGISTRY: Final = Path("vllm_omni/config/registry.py")
DEPLOY_DIR: Final = Path("vllm_omni/deploy")
_SUFFIXES: Final = {".py", ".yaml", ".yml"}


def families(root: Path) -> list[str]:
    """Names of the family folders."""
    return sorted(
        path.parent.name
        for folder in (MODELS_DIR, DIFFUSION_MODELS_DIR)
        for path in (root / folder).glob("*/pipeline.py")
    )


def model_names_in_core(root: Path) -> list[str]:
    """Lines outside the models' folders that name a model."""
    names = families(root)
    pattern = re.compile(
        "|".join(rf"(?<![a-z]){re.escape(name)}" for name in (*names, *UPSTREAM_MODELS)),
        re.IGNORECASE,
    )
    complaints = []
    for path in sorted((root / "vllm_omni").rglob("*")):
        name = path.relative_to(root)
        if path.suffix not in _SUFFIXES or _may_name_models(name, names):
            continue
        if found := pattern.search(str(name)):
            complaints.append(f"{name}: its path names a model ({found[0]})")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if (found := pattern.search(line)) and not _is_registry_line(name, line):
                complaints.append(f"{name}:{number} names a model ({found[0]})")
    return complaints


def _may_name_models(name: Path, names: list[str]) -> bool:
    if name.parent == DEPLOY_DIR:
        return name.stem in names or name.stem.partition(".")[0] in names
    return any(
        name.is_relative_to(folder) and len(name.parts) > len(folder.parts) + 1
        for folder in (MODELS_DIR, DIFFUSION_MODELS_DIR)
    )


def _is_registry_line(name: Path, line: str) -> bool:
    """An entry of the registry's tables: a key and a `module:attribute`, nothing else."""
    return name == REGISTRY and bool(re.fullmatch(r'\s*"[\w./-]+": "[\w.]+:\w+",?', line))
