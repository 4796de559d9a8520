"""Every example runs as a reader would run it, on a tiny random model."""

from __future__ import annotations

import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.served import Server, serve
from tests.tiny_models import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    with serve(model_dir, model_dir.parent / "server.log", []) as server:
        yield server


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "recording.wav"
    samples = 0.2 * np.sin(np.arange(16_000) * (2 * np.pi * 220 / 16_000))
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return path


def run(name: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def seconds(path: Path) -> float:
    with wave.open(str(path)) as file:
        return file.getnframes() / file.getframerate()


def test_every_example_has_a_test() -> None:
    names = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")}
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))

    assert [name for name in sorted(names) if f'"{name}"' not in source] == []


def test_examples_are_short() -> None:
    assert all(len(p.read_text().splitlines()) < 80 for p in EXAMPLES.rglob("*.py"))


def test_offline_chat(model_dir: Path, tmp_path: Path) -> None:
    output = run(
        "offline_inference/chat.py", "Hello there!", "Who?", "--model", model_dir,
        "--out", tmp_path, "--max-tokens", 12,
    )  # fmt: skip

    assert output.count("Q: ") == 2
    assert seconds(tmp_path / "answer_0.wav") > 0.1


def test_offline_speech(model_dir: Path, tmp_path: Path) -> None:
    run(
        "offline_inference/text_to_speech.py", "Good morning!", "And a good day.",
        "--model", model_dir, "--out", tmp_path,
    )  # fmt: skip

    assert seconds(tmp_path / "speech_1.wav") > 0.3


def test_offline_transcription(model_dir: Path, recording: Path) -> None:
    output = run("offline_inference/x_to_text.py", recording, "--model", model_dir)

    assert f"{recording}: " in output


def test_offline_answers_to_recordings(model_dir: Path, recording: Path) -> None:
    output = run("offline_inference/x_to_text.py", recording, "--model", model_dir, "--answer")

    assert f"{recording}: " in output


def test_offline_streaming(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "answer.wav"
    output = run(
        "offline_inference/streaming_chat.py", "Hello!", "--model", model_dir, "--out", path,
        "--max-tokens", 20,
    )  # fmt: skip

    assert "thinker: first output after" in output
    assert "voice: first output after" in output
    assert seconds(path) > 0.1


def test_online_chat_by_text_and_voice(server: Server, recording: Path, tmp_path: Path) -> None:
    path = tmp_path / "answer.wav"
    run(
        "online_serving/chat.py", "Hello!", "--recording", recording, "--out", path,
        "--base-url", f"{server.url}/v1", "--rate-hz", 16_000, "--max-tokens", 20,
    )  # fmt: skip

    assert seconds(path) > 0.1


def test_online_speech(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    output = run(
        "online_serving/text_to_speech.py", "Good morning!", "--out", path,
        "--base-url", f"{server.url}/v1",
    )  # fmt: skip

    assert "first bytes after" in output
    assert seconds(path) > 0.3


def test_online_transcription(server: Server, recording: Path) -> None:
    run("online_serving/x_to_text.py", recording, "--base-url", f"{server.url}/v1")
