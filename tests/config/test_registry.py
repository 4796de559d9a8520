from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from vllm_omni.config import registry
from vllm_omni.config.registry import known_pipelines, load_pipeline
from vllm_omni.errors import ConfigError, UnsupportedModelError


def install(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    """Pretend that installed packages have these entry points."""
    found = [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in points]
    monkeypatch.setattr(registry, "entry_points", lambda group: found)


def test_the_registry_is_a_table_of_strings_that_loads_no_family():
    code = (
        "import sys; from vllm_omni.config import registry; registry.known_pipelines();"
        "print([m for m in sys.modules if m.startswith('vllm_omni.model_executor.models.')"
        " or m in ('torch', 'vllm')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_family_of_another_package_is_found_through_its_entry_point(monkeypatch):
    install(monkeypatch, ("test_trio", "tests.trio:PIPELINE"))
    assert load_pipeline("test_trio").model_type == "test_trio"
    assert "smol_voice" in known_pipelines()


def test_two_families_for_one_model_type_are_refused(monkeypatch):
    install(monkeypatch, ("smol_voice", "other.package:PIPELINE"))
    with pytest.raises(ConfigError, match=r"two pipelines for model_type 'smol_voice'.*other\.pa"):
        known_pipelines()


def test_an_unknown_model_type_names_the_nearest_and_all():
    with pytest.raises(UnsupportedModelError, match=r"did you mean 'smol_voice'.*known"):
        load_pipeline("smol_vocie")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no.such.module:PIPELINE", "cannot be loaded from no.such.module:PIPELINE"),
        ("tests.trio:NOTHING", "cannot be loaded from tests.trio:NOTHING"),
        ("tests.trio:GPUS", "tests.trio:GPUS is not a PipelineConfig"),
    ],
)
def test_a_broken_registration_says_where_it_points(monkeypatch, value, message):
    install(monkeypatch, ("broken", value))
    with pytest.raises(ConfigError, match=message):
        load_pipeline("broken")
