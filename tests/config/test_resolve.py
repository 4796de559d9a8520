from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest

from tests.trio import FakePlatform
from vllm_omni.config.deploy import ResolvedConfig, ResolvedStage
from vllm_omni.config.resolve import resolve
from vllm_omni.errors import ConfigError, UnsupportedModelError, VersionError


def resolved(model_dir: Path, yaml: str | None = None, **options: Any) -> ResolvedConfig:
    if yaml is not None:
        path = model_dir.parent / "deploy.yaml"
        path.write_text(yaml)
        options["deploy_config"] = path
    return resolve(model_dir, platform=FakePlatform(), **options)


def stage(config: ResolvedConfig, name: str) -> ResolvedStage:
    return config.stages[config.pipeline.stage_id(name)]


def refused(match: str):
    return pytest.raises(ConfigError, match=rf"^[^\n]*{match}[^\n]*$")


def test_the_models_own_defaults_arrive(model_dir: Path):
    config = resolved(model_dir)
    assert stage(config, "ears").deploy.engine_args["max_model_len"] == 448
    assert stage(config, "mouth").deploy.engine_args == {"first_clause_words": 3, "gain": 1.0}
    assert config.provenance["stages.ears.engine_args.max_model_len"] == "model (test_trio)"
    assert stage(config, "mind").model_dir == model_dir / "mind"


def test_each_layer_wins_over_the_one_before_and_says_so(model_dir: Path):
    key = "stages.mind.engine_args.dtype"
    yaml = "stages:\n  mind:\n    dtype: float16\n"
    layers = [
        ({}, "bfloat16", "model (test_trio)"),
        ({"yaml": yaml}, "float16", f"{model_dir.parent}/deploy.yaml:3"),
        ({"engine_options": {"dtype": "float32"}}, "float32", "engine option dtype"),
        ({"cli": {"dtype": "half"}}, "half", "--dtype"),
        ({"stage_overrides": ["mind.dtype=auto"]}, "auto", "--stage mind.dtype"),
    ]
    given: dict[str, Any] = {}
    for options, value, source in layers:
        given |= options
        config = resolved(model_dir, **given)
        assert stage(config, "mind").deploy.engine_args["dtype"] == value
        assert config.provenance[key] == source


def test_the_variable_for_kv_caches_is_a_layer_like_any_other(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    key = "engine_args.kv_cache_memory_bytes"
    config = resolved(model_dir, stage_overrides=["mind.kv_cache_memory_bytes=1000000"])

    assert stage(config, "ears").deploy.engine_args["kv_cache_memory_bytes"] == 2 << 30
    assert config.provenance[f"stages.ears.{key}"] == "VLLM_CPU_KVCACHE_SPACE"
    assert stage(config, "mind").deploy.engine_args["kv_cache_memory_bytes"] == 1_000_000
    assert config.provenance[f"stages.mind.{key}"] == "--stage mind.kv_cache_memory_bytes"
    for wrong in ("much", "0", "-1", "1.5"):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", wrong)
        with refused("VLLM_CPU_KVCACHE_SPACE must be a whole number of GiB"):
            resolved(model_dir)


_ALIASES = "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("stages:\n  mnd: {}\n", "unknown setting 'stages.mnd'; did you mean 'mind'"),
        ("stages:\n  mnd:\n", "unknown setting 'stages.mnd'"),
        ("stages:\0", "not YAML: unacceptable character"),
        ("a: &a [x, x]\n" + _ALIASES, "more than 50000 values, aliases included"),
        ("limits: &a\n  x: *a\n", "nested too deep"),
        ("[" * 20_000, "nested too deep"),
        ("? [a]\n: 5\n", "a name must be a word"),
        ("limits:\n  max_in_flight: 2020-99-99\n", "not YAML|whole number"),
        ("#" + "x" * 2_000_000, "more than a deploy YAML may have"),
    ],
)
def test_a_file_that_is_no_deploy_yaml_is_refused_on_one_line(
    model_dir: Path, text: str, match: str
):
    with refused(match):
        resolved(model_dir, text)


def test_a_stage_that_is_named_may_be_left_as_it_is(model_dir: Path):
    config = resolved(model_dir, "\ufeffstages:\n  mind:\n  ears: {}\nlimits:\n")
    assert config.provenance.keys() == resolved(model_dir).provenance.keys()


@pytest.mark.parametrize("name", ["", "nothing.yaml", "/dev/null", "a\0b", "a" * 5000])
def test_what_is_no_file_is_refused(model_dir: Path, name: str):
    with refused("cannot be read"):
        resolved(model_dir, deploy_config=model_dir / name)


def test_an_engine_option_reaches_all_autoregressive_stages(model_dir: Path):
    config = resolved(model_dir, engine_options={"dtype": "float32", "seed": 7})
    for name in ("ears", "mind"):
        assert stage(config, name).deploy.engine_args["dtype"] == "float32"
        assert stage(config, name).deploy.engine_args["seed"] == 7
    assert "seed" not in stage(config, "mouth").deploy.engine_args


def test_an_option_that_describes_one_checkpoint_means_the_stage_that_reads_the_prompt(
    model_dir: Path,
):
    config = resolved(model_dir, cli={"max_model_len": 1024})
    assert stage(config, "mind").deploy.engine_args["max_model_len"] == 1024
    assert stage(config, "ears").deploy.engine_args["max_model_len"] == 448


def test_each_stage_gets_its_own_copy_of_an_object(model_dir: Path):
    config = resolved(model_dir, engine_options={"compilation_config": {"mode": 0}})
    ears, mind = (
        stage(config, n).deploy.engine_args["compilation_config"] for n in ("ears", "mind")
    )
    assert ears == mind == {"mode": 0}
    assert ears is not mind


FIELDS = [
    ("num_replicas", "2", 2),
    ("num_threads", "3", 3),
    ("memory_fraction", "0.25", 0.25),
    ("max_batch_size", "5", 5),
    ("start_timeout_s", "30", 30.0),
    ("devices", "cpu", ("cpu",)),
]


@pytest.mark.parametrize(("name", "text", "value"), FIELDS)
@pytest.mark.parametrize("stage_name", ["mind", "mouth"])
def test_each_stage_field_arrives_from_both_places(
    model_dir: Path, stage_name: str, name: str, text: str, value: object
):
    yaml = f"stages:\n  {stage_name}:\n    {name}: {text}\n"
    for options in ({"yaml": yaml}, {"stage_overrides": [f"{stage_name}.{name}={text}"]}):
        config = resolved(model_dir, **options)
        assert getattr(stage(config, stage_name).deploy, name) == value
        assert (
            name in config.provenance[f"stages.{stage_name}.{name}"]
            or "yaml:3" in (config.provenance[f"stages.{stage_name}.{name}"])
        )


LIMITS = [
    ("max_in_flight", 3),
    ("request_timeout_s", 1.5),
    ("drain_timeout_s", 0.0),
    ("max_audio_bytes", 1024),
    ("max_audio_s", 12.0),
    ("max_image_bytes", 1024),
    ("max_image_pixels", 4096),
    ("max_video_bytes", 1024),
    ("max_video_s", 2.5),
    ("max_video_pixels", 4096),
    ("max_media_items", 2),
    ("max_speech_chars", 10),
    ("media_fetch", "public"),
    ("media_fetch", "media.example.org,10.0.0.7"),
    ("max_body_bytes", 4096),
    ("max_input_bytes", 8192),
]


@pytest.mark.parametrize(("name", "value"), LIMITS)
def test_each_limit_arrives_from_every_place(model_dir: Path, name: str, value: object):
    for options in (
        {"yaml": f"limits:\n  {name}: {value}\n"},
        {"cli": {name: value}},
        {"engine_options": {name: value}},
    ):
        assert getattr(resolved(model_dir, **options).limits, name) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("mind.max_model_len=512", 512),
        ("mind.max-model-len=1k", 1000),
        ("mind.max_model_len=1K", 1024),
        ("mind.engine_args.max_model_len=512", 512),
        ("mind.max_model_len=auto", -1),
        ("mind.enforce_eager=true", True),
        ("mind.enable_prefix_caching=no", False),
        ("mind.kv_cache_memory_bytes=64MiB", 64 << 20),
        ("mind.quantization=none", None),
        ("mind.dtype=float32", "float32"),
        ("mind.tokenizer=512", "512"),
        ('mind.limit_mm_per_prompt={"audio": 2}', {"audio": 2}),
        ("mind.cudagraph_capture_sizes=[1, 2]", [1, 2]),
        ("mind.compilation_config.mode=0", {"mode": 0}),
        ("mind.additional_config.a.b=[1]", {"a": {"b": [1]}}),
        ("mouth.first_clause_words=2", 2),
        ("mouth.gain=0.5", 0.5),
    ],
)
def test_engine_options_of_a_stage_are_parsed_by_their_type(
    model_dir: Path, text: str, value: object
):
    config = resolved(model_dir, stage_overrides=[text])
    name, _, field = text.partition("=")[0].partition(".")
    field = field.removeprefix("engine_args.").replace("-", "_").partition(".")[0]
    assert stage(config, name).deploy.engine_args[field] == value


def test_an_enum_of_vllm_is_found_by_its_name(model_dir: Path):
    config = resolved(model_dir, stage_overrides=["mind.attention_backend=torch_sdpa"])
    backend = stage(config, "mind").deploy.engine_args["attention_backend"]
    assert isinstance(backend, enum.Enum)
    assert backend.name == "TORCH_SDPA"


def test_parts_of_a_mapping_add_up(model_dir: Path):
    config = resolved(
        model_dir,
        "stages:\n  mind:\n    additional_config: {a: 1, b: {c: 2}}\n",
        stage_overrides=["mind.additional_config.b.d=3", "mind.additional_config.e=x"],
    )
    wanted = {"a": 1, "b": {"c": 2, "d": 3}, "e": "x"}
    assert stage(config, "mind").deploy.engine_args["additional_config"] == wanted


def test_vllms_names_for_our_own_fields_set_those(model_dir: Path):
    config = resolved(
        model_dir,
        stage_overrides=["mind.max_num_seqs=3", "mind.gpu_memory_utilization=0.4"],
    )
    deploy = stage(config, "mind").deploy
    assert deploy.max_batch_size == 3
    assert deploy.memory_fraction == 0.4
    assert deploy.engine_args["gpu_memory_utilization"] == 0.4
    assert "max_num_seqs" not in deploy.engine_args


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("stage: {}", r"deploy.yaml:1: unknown setting 'stage'; did you mean 'stages'\?"),
        ("limits:\n  max_inflight: 3", r"yaml:2: unknown setting 'limits.max_inflight'; did you"),
        ("stages:\n  mnd:\n    dtype: auto", r"yaml:3: unknown setting 'stages.mnd.dtype'; did y"),
        (
            "stages:\n  mind:\n    max_modle_len: 5",
            r"yaml:3: unknown setting 'stages.mind.max_modle_len'; did you mean 'max_model_len'\?",
        ),
        (
            "stages:\n  mind:\n    engine_args:\n      dtpye: half",
            r"yaml:4: unknown setting 'stages.mind.engine_args.dtpye'; did you mean 'dtype'\?",
        ),
        (
            "stages:\n  mouth:\n    num_replica: 2",
            r"yaml:3: unknown setting 'stages.mouth.num_replica'; did you mean 'num_replicas'\?",
        ),
        (
            "stages:\n  mouth:\n    dtype: half",
            r"yaml:3: unknown setting 'stages.mouth.dtype'; known: .*first_clause_words",
        ),
        (
            "stages:\n  mind:\n    engine_args:\n      num_replicas: 2",
            r"unknown setting 'stages.mind.engine_args.num_replicas'",
        ),
        ("stages:\n  mind:\n    dtype: bfloat61", r"mind.dtype must be one of .*did you mean 'bfl"),
        (
            "stages:\n  mind:\n    max_model_len: [1]",
            r"yaml:3: .*max_model_len must be a whole num",
        ),
        (
            "stages:\n  mind:\n    num_replicas: 2.5",
            r"num_replicas must be a whole number, got 2.5",
        ),
        ("stages:\n  mind:\n    num_replicas: true", r"num_replicas must be a whole number, got T"),
        ("stages:\n  mind:\n    num_replicas: 0", r"yaml:3: .*num_replicas must be at least 1"),
        ("stages:\n  mind:\n    enforce_eager: 3", r"enforce_eager must be true or false, got 3"),
        ("stages:\n  mouth:\n    memory_fraction: 1.5", r"memory_fraction must be at most 1"),
        ("stages:\n  mouth:\n    gain: loud", r"stages.mouth.gain must be a number, got 'loud'"),
        ("limits:\n  max_in_flight: 0", r"limits.max_in_flight must be at least 1"),
        ("limits:\n  request_timeout_s: 0", r"limits.request_timeout_s must be above 0 and"),
        (
            "limits:\n  drain_timeout_s: -1",
            r"limits.drain_timeout_s must be above 0 and finite, got -1",
        ),
        (
            "limits:\n  request_timeout_s: .inf",
            r"limits.request_timeout_s must be .*finite, got inf",
        ),
        ("limits:\n  media_fetch: publik", r"must be deny, public or host.*did you mean 'public'"),
        ("limits:\n  media_fetch: a.org,b", r"limits.media_fetch must be deny, public or host"),
        ("limits:\n  media_fetch: 3", r"limits.media_fetch must be text, got 3"),
        ("limits:\n  resubmit: always", r"resubmit must be one of live, wait, never, got 'always'"),
        ("limits:\n  resubmit: no", r"limits.resubmit must be text"),
        ("stages:\n  mind:\n    max_restarts: -1", r"max_restarts must be at least 1, got -1"),
        ("stages:\n  mind:\n    stall_timeout: 3", r"did you mean 'stall_timeout_s'"),
        ("stages:\n  mind:\n    restart_backoff_s: 0", r"restart_backoff_s must be above 0"),
        ("limits: 3", r"yaml:1: limits must be a mapping"),
        ("stages:\n  mind: 3", r"yaml:2: stages.mind must be a mapping"),
        ("stages:\n  - mind", r"yaml:2: stages must be a mapping"),
        ("- a", r"yaml:1: the file must be a mapping"),
        ("a: [", r"yaml:1: not YAML"),
        (
            "stages:\n  mind:\n    dtype: half\n    dtype: half",
            r"yaml:4: stages.mind.dtype is already set in line 3",
        ),
        (
            "stages:\n  mind:\n    max_num_seqs: 2\n    max_batch_size: 3",
            r"yaml:4: stages.mind.max_batch_size is already set as stages.mind.max_num_seqs",
        ),
        (
            "stages:\n  mind:\n    dtype: half\n    engine_args: {dtype: half}",
            r"yaml:4: stages.mind.engine_args.dtype is already set as stages.mind.dtype",
        ),
        (
            "stages:\n  mind:\n    compilation_config: {mdoe: 0}",
            r"compilation_config has no field 'mdoe'; did you mean 'mode'\?",
        ),
        (
            "stages:\n  mind:\n    compilation_config: {mode: lots}",
            r"yaml:3: stages.mind.compilation_config is wrong at '.mode",
        ),
        (
            "stages:\n  mind:\n    data_parallel_size: 2",
            r"yaml:3: stages.mind.data_parallel_size cannot be set: set stages.NAME.num_replicas",
        ),
    ],
)
def test_a_wrong_deploy_yaml_is_refused_with_path_and_line(
    model_dir: Path, yaml: str, message: str
):
    with refused(message):
        resolved(model_dir, yaml)


def test_how_a_stage_is_supervised(model_dir: Path):
    yaml = """
stages:
  mind: {max_restarts: 0, restart_period_s: 60, restart_backoff_s: 0.5, stall_timeout_s: 0}
limits: {resubmit: wait, replica_drain_timeout_s: 0}
"""
    config = resolved(model_dir, yaml)
    deploy = config.stages[1].deploy
    assert (deploy.max_restarts, deploy.restart_period_s) == (0, 60.0)
    assert (deploy.restart_backoff_s, deploy.stall_timeout_s) == (0.5, 0.0)
    assert (config.limits.resubmit, config.limits.replica_drain_timeout_s) == ("wait", 0.0)


def test_empty_sections_and_an_empty_file_set_nothing(model_dir: Path):
    for yaml in ("", "# nothing", "stages:\n  mind:\nlimits:\n"):
        assert resolved(model_dir, yaml).limits == resolved(model_dir).limits


def test_a_deploy_yaml_that_is_not_there(model_dir: Path):
    with refused("deploy config '.*none.yaml' cannot be read: No such file"):
        resolved(model_dir, deploy_config=model_dir / "none.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mind", "--stage mind: write it as NAME.FIELD=VALUE"),
        ("mind=3", "write it as NAME.FIELD=VALUE"),
        ("mind.dtype", "write it as NAME.FIELD=VALUE"),
        (".dtype=half", "write it as NAME.FIELD=VALUE"),
        ("minds.dtype=half", "--stage minds.dtype: unknown setting .*did you mean 'mind'"),
        ("mind.dtpye=half", "unknown setting 'stages.mind.dtpye'; did you mean 'dtype'"),
        ("mind.dtype=hafl", "must be one of .*got 'hafl'"),
        ("mind.max_model_len=abc", "max_model_len must be a whole number.*got 'abc'"),
        ("mind.engine_args=1", "must be a mapping of settings"),
        ("mind.num_replicas.x=1", "must be a mapping|unknown setting"),
        ("mind.seed=1.5", "seed must be a whole number, got '1.5'"),
        ("mind.limit_mm_per_prompt={", "must be JSON"),
        ("mind.worker_cls=my.Worker", "cannot be set: it is decided by the stage's kind"),
        ("mind.compilation_config.mdoe=0", "compilation_config.mdoe has no field 'mdoe'"),
        ("mouth.max_model_len=4", "unknown setting 'stages.mouth.max_model_len'"),
    ],
)
def test_a_wrong_stage_option_is_refused(model_dir: Path, text: str, message: str):
    with refused(message):
        resolved(model_dir, stage_overrides=[text])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtpye": "half"}, "engine option dtpye: unknown option 'dtpye'; did you mean 'dtype'"),
        ({"num_replicas": 2}, "is set per stage: --stage NAME.num_replicas=VALUE"),
        ({"nnodes": 2}, "nnodes cannot be set: replicas run on this host"),
        ({"seed": "many"}, "seed must be a whole number, got 'many'"),
        ({"max_in_fligth": 2}, "did you mean 'max_in_flight'"),
    ],
)
def test_a_wrong_option_for_the_server_is_refused(
    model_dir: Path, options: dict[str, object], message: str
):
    with refused(message):
        resolved(model_dir, engine_options=options)


def test_a_torch_dtype_is_understood(model_dir: Path):
    import torch

    config = resolved(model_dir, engine_options={"dtype": torch.float32})
    assert stage(config, "mind").deploy.engine_args["dtype"] == "float32"


def test_a_model_that_is_plain_vllms_is_not_resolved(model_dir: Path):
    (model_dir / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModelError, match="is not a model of several stages"):
        resolved(model_dir)


def test_missing_weights_stop_it(model_dir: Path):
    (model_dir / "mind" / "model.safetensors").unlink()
    with refused("stage 'mind' has no weights"):
        resolved(model_dir)
    config = resolved(model_dir, engine_options={"load_format": "dummy"})
    assert stage(config, "mind").deploy.engine_args["load_format"] == "dummy"


def test_a_host_engine_of_another_release_stops_it(model_dir: Path, monkeypatch):
    monkeypatch.setattr("vllm_omni.version.installed_vllm", lambda: "0.31.4")
    with pytest.raises(VersionError, match=r"vllm-omni 0\.1\.0 needs vLLM 0\.32\.x, found .*0\.31"):
        resolved(model_dir)
