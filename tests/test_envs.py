from __future__ import annotations

import logging

import pytest

from vllm_omni import envs
from vllm_omni.config.resolve import shipped_deploy
from vllm_omni.errors import ConfigError


def test_nothing_set_is_no_opinion(monkeypatch):
    for name in ("VLLM_OMNI_DEPLOY_DIR", "VLLM_OMNI_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    assert envs.deploy_dir() is None
    assert envs.log_level() is None


def test_the_operators_deploy_folder_is_asked_first(monkeypatch, tmp_path):
    shipped = shipped_deploy("smol_voice", "cpu")
    assert shipped is not None
    monkeypatch.setenv("VLLM_OMNI_DEPLOY_DIR", str(tmp_path))
    assert shipped_deploy("smol_voice", "cpu") == shipped
    mine = tmp_path / "smol_voice.yaml"
    mine.write_text("")
    assert shipped_deploy("smol_voice", "cpu") == mine


def test_a_deploy_folder_that_is_none_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_OMNI_DEPLOY_DIR", str(tmp_path / "no"))
    with pytest.raises(ConfigError, match="VLLM_OMNI_DEPLOY_DIR must be a folder"):
        envs.deploy_dir()


def test_log_levels_go_by_name(monkeypatch):
    monkeypatch.setenv("VLLM_OMNI_LOG_LEVEL", "debug")
    assert envs.log_level() == logging.DEBUG
    monkeypatch.setenv("VLLM_OMNI_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match=r"VLLM_OMNI_LOG_LEVEL must be one of .*DEBUG"):
        envs.log_level()
