from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand

from vllm_omni import version
from vllm_omni.config import registry
from vllm_omni.entrypoints.cli import serve as serve_command
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.entrypoints.openai import server


@pytest.fixture
def started(monkeypatch) -> list[str]:
    """What would have been started: `omni` for our server, `vllm` for vLLM's own."""
    log: list[str] = []

    async def serve(args, config, admin_key=None, data_dir=None) -> None:
        log.append("omni")

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(lambda args: log.append("vllm")))
    return log


def error_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 1) -> str:
    """Run a command that must fail; returns its one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert caught.value.code == code
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("vllm-omni: error: ")
    return lines[0]


def test_a_model_of_several_stages_goes_to_our_server(model_dir: Path, started, monkeypatch):
    seen = {}

    async def serve(args, config, admin_key=None, data_dir=None) -> None:
        seen.update(args=args, config=config)

    monkeypatch.setattr(server, "serve", serve)
    main(["serve", str(model_dir), "--omni", "--port", "8123", "--max-in-flight", "5"])
    assert seen["args"].port == 8123
    assert seen["args"].model == str(model_dir)
    assert seen["config"].limits.max_in_flight == 5
    assert started == []


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        ([], None, None),
        (["--admin-api-key", "from the flag"], None, "from the flag"),
        ([], "from the environment", "from the environment"),
        (["--admin-api-key", "from the flag"], "from the environment", "from the flag"),
    ],
)
def test_the_operators_key_reaches_the_server_and_not_its_log(
    model_dir: Path, monkeypatch, words, environment, expected
):
    seen = {}

    async def serve(args, config, admin_key=None, data_dir=None) -> None:
        seen.update(args=args, admin_key=admin_key)

    monkeypatch.setattr(server, "serve", serve)
    if environment is not None:
        monkeypatch.setenv("VLLM_OMNI_ADMIN_API_KEY", environment)
    main(["serve", str(model_dir), "--omni", *words])
    assert seen["admin_key"] == expected
    assert "from the" not in str(vars(seen["args"])), "vLLM writes its arguments to the log"


def test_a_plain_text_model_is_served_by_vllm_itself(tmp_path: Path, started, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    seen = {}
    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(lambda args: seen.update(vars(args))))
    main(["serve", str(tmp_path), "--omni", "--max-model-len", "128", "--data-parallel-size=2"])
    assert seen["max_model_len"] == 128
    assert seen["model_tag"] == str(tmp_path)
    assert not {"omni", "stage", "deploy_config", "max_in_flight"} & set(seen)


def test_a_config_that_vllm_refuses_is_one_line(tmp_path: Path, started, capsys, monkeypatch):
    """vLLM makes its configs first; pydantic's words of several lines are no operator's."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))

    def refuse(args: argparse.Namespace) -> None:
        AsyncEngineArgs(model=str(tmp_path)).create_model_config()

    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(refuse))
    line = error_of(capsys, "serve", str(tmp_path), "--omni")
    assert f"'{tmp_path}' cannot be served: " in line
    assert "no_such_model" in line
    assert "pydantic" not in line


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--stage", "mind.dtype=half"], "--stage"),
        (["--deploy-config", "x.yaml"], "--deploy-config"),
        (["--max-in-flight", "256"], "--max-in-flight"),
        (["--admin-api-key", "x"], "--admin-api-key"),
    ],
)
def test_our_flags_are_refused_for_a_plain_model(tmp_path: Path, started, capsys, words, flag):
    (tmp_path / "config.json").write_text("{}")
    line = error_of(capsys, "serve", str(tmp_path), *words)
    assert f"{flag} needs a model of several stages" in line
    assert started == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stage", "mnd.dtype=half"], "unknown setting 'stages.mnd.dtype'; did you mean 'mind'?"),
        (["--stage", "mind.dtyp=half"], "--stage mind.dtyp: unknown setting 'stages.mind.dtyp'"),
        (["--stage", "mind.dtype=hlf"], "stages.mind.dtype must be one of"),
        (["--stage", "mind.memory_fraction=0.8", "--stage", "mouth.memory_fraction=0.3"], "= 1.1"),
        (["--deploy-config", "/no/such.yaml"], "deploy config '/no/such.yaml' cannot be read"),
        (["--max-in-flight", "0"], "--max-in-flight: limits.max_in_flight must be at least 1"),
        (["--api-server-count", "2"], "--api-server-count cannot be used with --omni: one API"),
        (["--headless"], "--headless cannot be used with --omni"),
        (["--grpc"], "--grpc cannot be used with --omni"),
        (["--nnodes", "2"], "--nnodes: stages.ears.nnodes cannot be set: replicas run on this"),
        (["--data-parallel-size", "2"], "cannot be set: set stages.NAME.num_replicas"),
        (["--chat-template", "/no/template.jinja"], "template"),
        (["--enable-auto-tool-choice"], "--enable-auto-tool-choice requires --tool-call-parser"),
    ],
)
def test_an_impossible_option_is_one_line_before_anything_starts(
    model_dir: Path, started, capsys, words, message
):
    assert message in error_of(capsys, "serve", str(model_dir), "--omni", *words)
    assert started == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-modle-len", "5"], "unrecognized arguments: --max-modle-len"),
        (["--max-modle-len=5"], "did you mean --max-model-len?"),
        (["--max-inflight", "5"], "did you mean --max-in-flight?"),
        (["--request-timeot", "5"], "did you mean --request-timeout?"),
        (["--deploy-cnofig", "x"], "did you mean --deploy-config?"),
        (["--max-in-flight", "many"], "must be a whole number, got 'many'"),
        (["--request-timeout", "soon"], "must be a number, got 'soon'"),
        (["--port", "x"], "argument --port: invalid int value: 'x'"),
        (["--dtype", "int3"], "argument --dtype: invalid choice"),
        (["--stage"], "argument --stage: expected at least one argument"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_the_nearest(
    model_dir: Path, started, capsys, words, message
):
    assert message in error_of(capsys, "serve", str(model_dir), "--omni", *words, code=2)
    assert started == []


def test_a_wrong_model_folder_is_one_line(tmp_path: Path, started, capsys):
    missing = tmp_path / "nope"
    assert f"model folder '{missing}' does not exist" in error_of(capsys, "serve", str(missing))
    assert "has no config.json" in error_of(capsys, "serve", str(tmp_path), "--omni")
    assert "name a model" in error_of(capsys, "serve", "--omni")
    assert started == []


def test_missing_weights_are_one_line(model_dir: Path, started, capsys):
    (model_dir / "mouth" / "model.safetensors").unlink()
    assert "stage 'mouth' has no weights" in error_of(capsys, "serve", str(model_dir), "--omni")
    assert started == []


def test_the_flag_may_stand_anywhere_and_may_be_left_out(model_dir: Path, started):
    main(["--omni", "serve", str(model_dir)])
    main(["serve", "--omni", str(model_dir)])
    main(["serve", str(model_dir)])
    assert started == ["omni"] * 3


def test_repeated_stage_flags_make_vllm_warn_of_nothing(model_dir: Path, started, caplog):
    main(["serve", str(model_dir), "--stage", "mind.seed=1", "--stage=mind.num_threads=1"])
    assert started == ["omni"]
    assert "duplicate" not in caplog.text


def test_another_release_of_vllm_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(version, "installed_vllm", lambda: "0.33.1")
    line = error_of(capsys, "serve", "anything", "--omni")
    assert "needs vLLM 0.32.x, found vLLM 0.33.1" in line


def test_an_interrupt_leaves_quietly(model_dir: Path, monkeypatch, capsys):
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_command, "resolved", interrupted)
    with pytest.raises(SystemExit) as caught:
        main(["serve", str(model_dir)])
    assert caught.value.code == 130
    assert "Traceback" not in capsys.readouterr().err


def test_help_shows_the_omni_group(capsys, monkeypatch):
    monkeypatch.setattr("vllm.utils.argparse_utils.FlexibleArgumentParser._search_keyword", None)
    for words in (["serve", "--help"], ["serve", "--omni", "--help=omni"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "Models of several stages: where and how each stage runs" in text
    assert "--stage NAME.FIELD=VALUE" in text
    assert "--request-timeout SECONDS" in text
    assert "Requests admitted at once" in text


def test_help_lists_vllms_subcommands_and_ours(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vllm-omni"])
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for name in ("serve", "bench", "chat", "run-batch", "config", "demo-model"):
        assert name in text


def test_the_version_names_both(capsys):
    main(["--version"])
    assert capsys.readouterr().out.strip() == "vllm-omni 0.1.0 (vLLM 0.32.0)"


def test_the_demo_model_is_assembled_by_its_family(monkeypatch, tmp_path: Path, capsys):
    made = []
    monkeypatch.setitem(sys.modules, "made_up", type(sys)("made_up"))
    sys.modules["made_up"].assemble = lambda out, *, progress: made.append((out, progress))
    monkeypatch.setattr(registry, "DEMOS", {"x": "made_up:assemble"})
    monkeypatch.setattr("vllm_omni.entrypoints.cli.demo_model.DEMOS", {"x": "made_up:assemble"})
    main(["demo-model", str(tmp_path / "out"), "--no-progress"])
    assert made == [(tmp_path / "out", False)]


def test_a_missing_extra_says_how_to_install_it(monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setattr("vllm_omni.entrypoints.cli.demo_model.DEMOS", {"x": "no_such_package:f"})
    line = error_of(capsys, "demo-model", str(tmp_path / "out"))
    assert "(no_such_package is missing): pip install 'vllm-omni[demo]'" in line
