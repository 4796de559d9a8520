"""The examples for omni models, as a reader would run them, on a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.served import Server, serve
from tests.e2e.omni_server import wav, wave
from tests.entrypoints.openai.media.clips import mp4, png
from tests.examples.test_examples import run, seconds
from vllm_omni.envs import CPU_KV_CACHE
from vllm_omni.model_executor.models.qwen3_omni.tiny import make_tiny

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def small_caches() -> Iterator[None]:
    """Server and example each take half of the memory otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CPU_KV_CACHE, "1")
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    with serve(model_dir, model_dir.parent / "server.log", []) as server:
        yield server


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    contents = {"photo.png": png(), "said.wav": wav(wave(0.5)), "clip.mp4": mp4()}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in contents]


def test_a_served_model_is_asked_about_files(
    server: Server, files: list[Path], tmp_path: Path
) -> None:
    path = tmp_path / "answer.wav"
    output = run(
        "online_serving/omni_chat.py", "What is this?", *files, "--out", path,
        "--voice", "ethan", "--base-url", f"{server.url}/v1", "--max-tokens", 12,
    )  # fmt: skip

    assert "first sound after" in output
    assert seconds(path) > 0.1


def test_text_alone_is_enough(server: Server, files: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "answer.wav"
    run(
        "online_serving/omni_chat.py", "What is this?", files[0], "--out", path, "--text-only",
        "--base-url", f"{server.url}/v1", "--max-tokens", 12,
    )  # fmt: skip

    assert not path.exists()


def test_offline(model_dir: Path, files: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "answer.wav"
    run(
        "offline_inference/omni_chat.py", "What is this?", *files, "--model", model_dir,
        "--out", path, "--max-tokens", 12,
    )  # fmt: skip

    assert seconds(path) > 0.1
