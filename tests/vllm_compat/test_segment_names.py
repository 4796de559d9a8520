from __future__ import annotations

import multiprocessing
from multiprocessing import process, shared_memory

import pytest

from vllm_omni.vllm_compat import segment_names


def made_name() -> str:
    segment = shared_memory.SharedMemory(create=True, size=16)
    segment.close()
    segment.unlink()
    return segment.name


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_make_filename", shared_memory._make_filename)
    config = process.current_process()._config
    monkeypatch.setitem(config, "semprefix", config["semprefix"])


def test_segments_say_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_SEGMENT_PREFIX", "vllm-omni-abcd1234-")
    segment_names.install()
    names = {made_name() for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("vllm-omni-abcd1234-") for name in names)
    lock = multiprocessing.get_context("spawn").Lock()
    assert lock._semlock.name.startswith("/vllm-omni-abcd1234-lock-")


def test_without_a_prefix_python_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_OMNI_SEGMENT_PREFIX", raising=False)
    segment_names.install()
    assert made_name().startswith("psm_")
