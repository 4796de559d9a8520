"""Sockets live in a private folder that goes with its owner."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni.distributed.run_directory import SHARED_MEMORY, RunDirectory
from vllm_omni.errors import ConfigError


def test_a_folder_is_private_and_removed(tmp_path: Path) -> None:
    base = tmp_path / "base"
    directory = RunDirectory.create("voice/0", base)

    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    assert directory.ipc("data") == f"ipc://{directory.path}/data"
    (directory.path / "data").touch()
    directory.remove()
    directory.remove()
    assert not list(base.iterdir())


def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    base = tmp_path / "base"
    code = (
        "import os, signal; from pathlib import Path;"
        "from vllm_omni.distributed.run_directory import RunDirectory;"
        f"d = RunDirectory.create('old/0', Path({str(base)!r}));"
        "(d.path / 'data').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name[:6] for path in base.iterdir()] == ["old-0-"]

    directory = RunDirectory.create("new/0", base)

    assert [path.name[:6] for path in base.iterdir()] == ["new-0-"]
    directory.remove()


def test_shared_memory_goes_with_its_folder_and_with_no_other(tmp_path: Path) -> None:
    base = tmp_path / "base"
    first, second = RunDirectory.create("a/0", base), RunDirectory.create("b/0", base)
    names = [f"{one.segment_prefix}queue" for one in (first, second)]
    for name in names:
        (SHARED_MEMORY / name).write_bytes(bytes(64))  # what a named segment is
    first.remove()
    left = [(SHARED_MEMORY / name).exists() for name in names]
    second.remove()
    left += [(SHARED_MEMORY / name).exists() for name in names]

    assert left == [False, True, False, False]


def test_shared_memory_of_a_killed_process_is_removed_at_the_next_start(tmp_path: Path) -> None:
    base = tmp_path / "base"
    code = (
        "import os, signal; from pathlib import Path;"
        "from vllm_omni.distributed.run_directory import RunDirectory;"
        f"d = RunDirectory.create('old/0', Path({str(base)!r}));"
        "(d.path / 'vllm_dist_abc').touch();"
        "names = [d.segment_prefix + '0123', f'sem.{d.segment_prefix}lock', 'vllm_dist_abc-0'];"
        "[Path('/dev/shm', name).write_bytes(b'0') for name in names];"
        "print(*names, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE)
    segments = [SHARED_MEMORY / name for name in killed.stdout.decode().split()]
    assert [segment.exists() for segment in segments] == [True] * 3
    RunDirectory.create("new/0", base).remove()

    assert [segment.exists() for segment in segments] == [False] * 3


def test_folders_of_living_owners_stay(tmp_path: Path) -> None:
    first = RunDirectory.create("a", tmp_path / "base")
    second = RunDirectory.create("b", tmp_path / "base")

    assert first.path.exists()
    first.remove()
    second.remove()


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir(mode=0o755)
    base.chmod(0o755)

    with pytest.raises(ConfigError, match="mode 0700"):
        RunDirectory.create("voice/0", base)


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        RunDirectory.create("voice/0", tmp_path / ("x" * 100))
