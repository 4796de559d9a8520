from __future__ import annotations

import os

import pytest

from vllm_omni.vllm_compat import apply, onednn_isa


def test_the_bound_is_set_for_this_process_and_its_children(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(onednn_isa.VARIABLE, "")
    monkeypatch.delenv(onednn_isa.VARIABLE)
    apply.apply_all()
    assert os.environ[onednn_isa.VARIABLE] == "AVX512_CORE_BF16"


def test_the_operators_value_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(onednn_isa.VARIABLE, "AVX2")
    apply.apply_all()
    assert os.environ[onednn_isa.VARIABLE] == "AVX2"
