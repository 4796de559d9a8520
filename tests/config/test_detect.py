from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trio import PIPELINE
from vllm_omni.config.detect import check_weights, detect, locate
from vllm_omni.errors import ConfigError


def one_line_error(match: str):
    return pytest.raises(ConfigError, match=rf"^[^\n]*{match}[^\n]*$")


def safetensors_bytes() -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [16, 19]},
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(19)


def test_a_pipelines_folder_is_recognised_by_its_model_type(model_dir: Path):
    assert detect(model_dir) == "test_trio"


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {}, {"model_type": 5}])
def test_any_other_model_is_left_to_vllm(tmp_path: Path, config: dict[str, object]):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert detect(tmp_path) is None


def test_a_folder_that_does_not_exist(tmp_path: Path):
    with one_line_error("model folder '.*nowhere' does not exist"):
        locate(str(tmp_path / "nowhere"))
    with one_line_error("model folder 'nowhere' does not exist"):
        locate("nowhere")


def test_a_file_instead_of_a_folder(tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"")
    with one_line_error("is a file; give the folder"):
        locate(str(tmp_path / "model.gguf"))


def test_a_hub_name_that_cannot_be_fetched(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with one_line_error("'some/model' is neither a folder here nor available from the model hub"):
        locate("some/model")


def test_a_folder_without_config(tmp_path: Path):
    with one_line_error("has no config.json"):
        detect(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n"b"}', r"config.json:2: not JSON"),
        ("[]", "config.json: not a JSON object"),
        ("", "config.json:1: not JSON"),
        ("[" * 100_000, "config.json: nested too deep"),
    ],
)
def test_a_config_that_is_not_a_json_object(tmp_path: Path, text: str, message: str):
    (tmp_path / "config.json").write_text(text)
    with one_line_error(message):
        detect(tmp_path)


def test_a_config_that_is_not_text(tmp_path: Path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with one_line_error("cannot be read"):
        detect(tmp_path)


def test_complete_weights_pass(model_dir: Path):
    check_weights(model_dir, PIPELINE)


def test_missing_weights_name_stage_and_folder(model_dir: Path):
    (model_dir / "mouth" / "model.safetensors").unlink()
    with one_line_error(r"stage 'mouth' has no weights in '.*mouth' \(looked for \*\.safetensors"):
        check_weights(model_dir, PIPELINE)


def test_a_missing_stage_folder(model_dir: Path):
    (model_dir / "mouth" / "model.safetensors").unlink()
    (model_dir / "mouth").rmdir()
    with one_line_error("stage 'mouth' has no folder"):
        check_weights(model_dir, PIPELINE)


def test_an_autoregressive_stage_needs_its_own_config(model_dir: Path):
    (model_dir / "mind" / "config.json").unlink()
    with one_line_error("stage 'mind' has no config.json"):
        check_weights(model_dir, PIPELINE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid x", "git lfs pull"),
        (b"w", "is cut short"),
        (safetensors_bytes()[:20], "is cut short"),
        (safetensors_bytes()[:-1], "is cut short"),
        ((4).to_bytes(8, "little") + b"junk", "no safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "no safetensors file"),
    ],
)
def test_weights_that_are_no_weights(model_dir: Path, content: bytes, message: str):
    (model_dir / "mind" / "model.safetensors").write_bytes(content)
    with one_line_error(f"stage 'mind': weights file '.*' .*{message}"):
        check_weights(model_dir, PIPELINE)


def test_weights_that_are_whole(model_dir: Path):
    (model_dir / "mind" / "model.safetensors").write_bytes(safetensors_bytes())
    check_weights(model_dir, PIPELINE)


def test_a_missing_shard(model_dir: Path):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}
    (model_dir / "mind" / "model.safetensors.index.json").write_text(json.dumps(index))
    with one_line_error("stage 'mind' lacks 1 of 2 weights files .* first 'model-1.safetensors'"):
        check_weights(model_dir, PIPELINE)


def test_a_stage_with_dummy_weights_needs_no_files(model_dir: Path):
    (model_dir / "mind" / "model.safetensors").unlink()
    check_weights(model_dir, PIPELINE, without_weights=["mind"])
