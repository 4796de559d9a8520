from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_omni.entrypoints.cli.main import main


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, tuple[object, str]]:
    capsys.readouterr()
    main(["config", "explain", *words, "--json"])
    rows = json.loads(capsys.readouterr().out)
    return {row["key"]: (row["value"], row["source"]) for row in rows}


def test_every_value_has_a_source(model_dir: Path, capsys):
    rows = explained(capsys, str(model_dir))
    assert rows["limits.max_in_flight"] == (256, "default")
    assert rows["stages.mouth.num_replicas"] == (1, "default")
    assert rows["stages.mind.engine_args.dtype"] == ("bfloat16", "model (test_trio)")
    assert rows["stages.mouth.devices"] == (["cpu"], "platform (cpu)")


def test_flags_of_every_kind_arrive_and_are_named(model_dir: Path, tmp_path: Path, capsys):
    deploy = tmp_path / "mine.yaml"
    deploy.write_text("limits:\n  max_media_items: 3\nstages:\n  ears:\n    seed: 5\n")
    rows = explained(
        capsys,
        str(model_dir),
        *("--deploy-config", str(deploy)),
        *("--max-in-flight", "7", "--request-timeout", "30", "--media-fetch", "public"),
        *("--max_audio_bytes=2K", "--drain-timeout=1", "--max-audio", "9", "--max-speech-chars=8"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1k"),
        *("--stage", "mind.seed=3", "--stage", "mouth.gain=0.5"),
        "--compilation-config.mode=0",
    )
    assert rows["limits.max_media_items"] == (3, f"{deploy}:2")
    assert rows["limits.max_in_flight"] == (7, "--max-in-flight")
    assert rows["limits.request_timeout_s"] == (30.0, "--request-timeout")
    assert rows["limits.media_fetch"] == ("public", "--media-fetch")
    assert rows["limits.max_audio_bytes"] == (2048, "--max-audio-bytes")
    assert rows["limits.drain_timeout_s"] == (1.0, "--drain-timeout")
    assert rows["limits.max_audio_s"] == (9.0, "--max-audio")
    assert rows["limits.max_speech_chars"] == (8, "--max-speech-chars")
    assert rows["stages.mind.engine_args.dtype"] == ("float32", "--dtype")
    assert rows["stages.ears.engine_args.dtype"] == ("float32", "--dtype")
    assert rows["stages.mind.engine_args.enforce_eager"] == (True, "--enforce-eager")
    assert rows["stages.mind.engine_args.max_model_len"] == (1000, "--max-model-len")
    assert rows["stages.ears.engine_args.max_model_len"] == (448, "model (test_trio)")
    assert rows["stages.mind.engine_args.seed"] == (3, "--stage mind.seed")
    assert rows["stages.ears.engine_args.seed"] == (5, f"{deploy}:5")
    assert rows["stages.mouth.engine_args.gain"] == (0.5, "--stage mouth.gain")
    assert "mode" in str(rows["stages.mind.engine_args.compilation_config"][0])


def test_a_flag_given_with_vllms_default_still_wins_over_the_model(model_dir: Path, capsys):
    rows = explained(capsys, str(model_dir), "--dtype", "auto")
    assert rows["stages.mind.engine_args.dtype"] == ("auto", "--dtype")


def test_flags_that_were_not_given_change_nothing(model_dir: Path, capsys):
    sources = {source for _, source in explained(capsys, str(model_dir)).values()}
    assert sources == {"default", "model (test_trio)", "platform (cpu)"}


def test_vllms_config_file_counts_as_given(model_dir: Path, tmp_path: Path, capsys):
    (tmp_path / "flags.yaml").write_text("dtype: float32\nmax-in-flight: 9\n")
    rows = explained(capsys, str(model_dir), "--config", str(tmp_path / "flags.yaml"))
    assert rows["stages.mind.engine_args.dtype"] == ("float32", "--dtype")
    assert rows["limits.max_in_flight"] == (9, "--max-in-flight")


def test_all_shows_what_vllm_decides(model_dir: Path, capsys):
    rows = explained(capsys, str(model_dir), "--all")
    assert rows["stages.mind.engine_args.seed"] == (0, "vLLM default")
    assert rows["stages.mind.engine_args.dtype"] == ("bfloat16", "model (test_trio)")


def test_the_table_has_a_line_for_each_value(model_dir: Path, capsys):
    main(["config", "explain", str(model_dir)])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["stages.mind.num_replicas", "1", "default"] for line in lines)
    assert len(lines) == len(explained(capsys, str(model_dir)))


def test_help_of_config_is_one_line(capsys):
    main(["config", "--help"])
    assert capsys.readouterr().out.startswith("usage: vllm-omni config explain MODEL")
