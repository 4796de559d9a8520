"""vLLM's own command, as a user runs it: what is wrong is said in one line, and nothing runs on."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

VLLM = Path(sys.executable).with_name("vllm")

pytestmark = pytest.mark.slow


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A folder that looks complete; its weights are one byte, so no stage could ever load."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "smol_voice"}))
    for stage in ("asr", "thinker", "voice"):
        part = tmp_path / stage
        part.mkdir()
        (part / "config.json").write_text("{}")
        (part / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    return tmp_path


def error_of(*words: str) -> str:
    """Standard error's last line; everything before it is vLLM's log."""
    done = subprocess.run(
        [str(VLLM), *words], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr + done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("vllm-omni: error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_port_in_use_is_found_before_any_stage_starts(model_dir: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ("serve", str(model_dir), "--omni", "--host", "127.0.0.1", "--port", port)
        line = error_of(*words)
    assert line.endswith(f"cannot listen on 127.0.0.1:{port}: Address already in use")


def test_a_misspelt_setting_reaches_the_user_through_vllms_command(model_dir: Path):
    line = error_of("serve", str(model_dir), "--omni", "--stage", "thinker.max_modle_len=5")
    assert "unknown setting 'stages.thinker.max_modle_len'; did you mean 'max_model_len'?" in line
