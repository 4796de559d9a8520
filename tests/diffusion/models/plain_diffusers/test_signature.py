"""What a class of diffusers takes is read from its source, without importing it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni.config.pipeline import Modality, Task
from vllm_omni.diffusion.models.interface import ExecutionMode
from vllm_omni.diffusion.models.plain_diffusers.capabilities import capabilities_of
from vllm_omni.diffusion.models.plain_diffusers.pipeline import pipeline_of
from vllm_omni.diffusion.models.plain_diffusers.signature import REQUIRED, signature_of_class
from vllm_omni.errors import ConfigError, UnsupportedModelError


def folder_of(tmp_path: Path, name: object) -> Path:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    return tmp_path


@pytest.mark.parametrize("name", ["StableDiffusionXLPipeline", "LTXPipeline", "SanaPipeline"])
def test_the_arguments_are_those_that_the_class_has(name: str) -> None:
    import diffusers

    parameters = inspect.signature(getattr(diffusers, name).__call__).parameters
    named = [n for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    read = signature_of_class(name).arguments

    assert list(read) == named[1:]
    for argument, default in read.items():
        actual = parameters[argument].default
        assert (default is REQUIRED) == (actual is inspect.Parameter.empty), argument
        if isinstance(default, int | float | str):
            assert default == actual, argument


def test_the_api_process_learns_it_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from vllm_omni.diffusion.models.plain_diffusers.capabilities import capabilities_of\n"
        "capabilities_of(pathlib.Path(sys.argv[1]))\n"
        "assert not {'torch', 'diffusers'} & set(sys.modules)\n"
    )
    folder = folder_of(tmp_path, "StableDiffusionPipeline")
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


def test_a_class_for_pictures_says_what_it_takes(tmp_path: Path) -> None:
    capabilities = capabilities_of(folder_of(tmp_path, "StableDiffusionPipeline"))

    assert capabilities.mode is ExecutionMode.REQUEST
    assert capabilities.emits is Modality.IMAGE
    assert capabilities.params == {"negative_prompt", "guidance_scale", "lora", "extra_args"}
    assert capabilities.defaults == {"num_inference_steps": 50, "guidance_scale": 7.5}
    assert (capabilities.min_images, capabilities.max_images) == (0, 0)
    assert capabilities.has_step_progress


def test_a_class_that_repaints_takes_a_picture_and_a_mask(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "StableDiffusionInpaintPipeline")
    capabilities = capabilities_of(folder)

    assert (capabilities.min_images, capabilities.max_images) == (1, 1)
    assert capabilities.takes_mask
    assert capabilities.needs_mask
    assert "strength" in capabilities.params
    (stage,) = pipeline_of(folder).stages
    assert stage.accepts == {Modality.TEXT, Modality.IMAGE}


def test_a_class_for_videos_is_an_entry_for_videos(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "LTXPipeline")

    assert capabilities_of(folder).emits is Modality.VIDEO
    assert capabilities_of(folder).defaults["num_frames"] == 161
    assert set(pipeline_of(folder).entries) == {Task.VIDEO}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("StableAudioPipeline", "neither pictures nor videos"),
        ("DDPMPipeline", "takes no prompt"),
        ("NoSuchPipeline", "no pipeline class 'NoSuchPipeline'"),
        ("os.system", "no pipeline class"),
    ],
)
def test_a_class_that_cannot_be_served_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        capabilities_of(folder_of(tmp_path, name))


def test_code_that_comes_with_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no pipeline class"):
        capabilities_of(folder_of(tmp_path, ["pipeline", "MyPipeline"]))
