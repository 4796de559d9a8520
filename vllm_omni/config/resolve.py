"""The only merge: model defaults < deploy YAML < options for the server < options of a stage.

Every value is checked where it is read and carries who set it; afterwards nobody changes a config.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Final, TypeVar

from vllm_omni import envs
from vllm_omni.config.deploy import ResolvedConfig, ResolvedStage, ServerLimits, StageDeploy
from vllm_omni.config.detect import check_weights, detect, locate, stage_dir
from vllm_omni.config.engine_options import engine_argument_types, stages_meant_by
from vllm_omni.config.pipeline import PipelineConfig, StageKind
from vllm_omni.config.placement import KV_BYTES, place
from vllm_omni.config.registry import known_pipelines, load_pipeline
from vllm_omni.config.schema import ENGINE_ARGS, LIMITS, STAGES, Schema, field_types, limit_flag
from vllm_omni.config.settings import Setting
from vllm_omni.config.suggestions import did_you_mean
from vllm_omni.config.yaml_source import read_deploy
from vllm_omni.errors import ConfigError, UnsupportedModelError
from vllm_omni.platforms import Platform, current_platform
from vllm_omni.version import check_vllm

SHIPPED: Final = "vllm_omni.deploy"
"""Package with the verified deploy YAMLs, `NAME.yaml` or `NAME.PLATFORM.yaml`."""

_KIND_DEFAULTS: Final[Mapping[StageKind, Mapping[str, object]]] = {
    # One decode of a long video, or compiling for a new size, is one piece of work.
    StageKind.DIFFUSION: {"stall_timeout_s": 300.0},
}

Values = dict[tuple[str, ...], object]
T = TypeVar("T")


def resolve(
    model: str | Path,
    *,
    deploy_config: str | Path | None = None,
    cli: Mapping[str, object] | None = None,
    stage_overrides: Sequence[str] = (),
    engine_options: Mapping[str, object] | None = None,
    platform: Platform | None = None,
) -> ResolvedConfig:
    """Decide everything about how `model` runs, and check it, before anything loads.

    Args:
        deploy_config: YAML that replaces the shipped one.
        cli: Options given for the whole server on a command line, by field name; only those that
            the user gave.
        stage_overrides: `NAME.FIELD=VALUE`, as after `--stage`.
        engine_options: The same as `cli`, given in Python.
        platform: Where it will run; None: this host.

    Raises:
        ConfigError: one line: the key's full path, who set it, and the nearest known name.
    """
    check_vllm()
    options = {**(engine_options or {}), **(cli or {})}
    revision = options.get("revision")
    model_dir = locate(str(model), revision if isinstance(revision, str) else None)
    model_type = detect(model_dir)
    if model_type is None:
        known = ", ".join(sorted(known_pipelines()))
        raise UnsupportedModelError(
            f"'{model_dir}' is not a model of several stages (model_type in its config.json; "
            f"known: {known})"
        )
    pipeline = load_pipeline(model_type, model_dir)
    platform = platform or current_platform()
    merge = _Merge(pipeline)
    merge.add(_family_settings(pipeline), by_family=True)
    if platform.device_type == "cpu":
        merge.add(_environment_settings(pipeline))
    name = pipeline.deploy_name or model_type
    merge.add(_deploy_settings(name, deploy_config, platform.device_type), once=True)
    merge.add(_server_settings(pipeline, engine_options or {}, _python_name))
    merge.add(_server_settings(pipeline, cli or {}, _flag_name))
    merge.add(stage_setting(text) for text in stage_overrides)
    return merge.finish(model_dir, platform)


def stage_setting(text: str) -> Setting:
    """`NAME.FIELD=VALUE` as a setting.

    Raises:
        ConfigError: it has another form.
    """
    path, equals, value = text.partition("=")
    key = tuple(
        part.strip().replace("-", "_") if i else part.strip()
        for i, part in enumerate(path.split("."))
    )
    if not equals or len(key) < 2 or not all(key):
        raise ConfigError(f"--stage {text}: write it as NAME.FIELD=VALUE")
    return Setting((STAGES, *key), value, f"--stage {path.strip()}")


def shipped_deploy(name: str, device_type: str) -> Path | None:
    """The operator's or the verified deploy YAML of a model for this kind of device."""
    folders = [envs.deploy_dir(), Path(str(resources.files(SHIPPED)))]
    names = (f"{name}.{device_type}.yaml", f"{name}.yaml")
    paths = [folder / name for folder in folders if folder for name in names]
    return next((path for path in paths if path.is_file()), None)


def _family_settings(pipeline: PipelineConfig) -> Iterator[Setting]:
    for stage in pipeline.stages:
        for name, value in _KIND_DEFAULTS.get(stage.kind, {}).items():
            yield Setting((STAGES, stage.name, name), value, f"stage kind ({stage.kind})")
        for name, value in stage.engine_defaults.items():
            yield Setting((STAGES, stage.name, name), value, f"model ({pipeline.model_type})")


def _environment_settings(pipeline: PipelineConfig) -> Iterator[Setting]:
    """vLLM lets this variable win over every flag; here it is the weakest word of the operator."""
    kv_bytes = envs.cpu_kv_cache_bytes()
    for stage in pipeline.stages:
        if kv_bytes is not None and stage.kind is StageKind.AUTOREGRESSIVE:
            yield Setting((STAGES, stage.name, KV_BYTES), kv_bytes, envs.CPU_KV_CACHE)


def _deploy_settings(
    name: str, deploy_config: str | Path | None, device_type: str
) -> list[Setting]:
    if deploy_config is not None:
        return read_deploy(Path(deploy_config).expanduser())
    path = shipped_deploy(name, device_type)
    return read_deploy(path) if path else []


def _python_name(name: str) -> str:
    return f"engine option {name}"


def _flag_name(name: str) -> str:
    is_limit = name in field_types(ServerLimits)
    return limit_flag(name) if is_limit else "--" + name.replace("_", "-")


def _server_settings(
    pipeline: PipelineConfig, options: Mapping[str, object], source: Callable[[str], str]
) -> Iterator[Setting]:
    """Options for the whole server: limits, and engine options for the stages they mean."""
    limits = field_types(ServerLimits)
    for name, value in options.items():
        who = source(name)
        if name in limits:
            yield Setting((LIMITS, name), value, who)
            continue
        if name not in engine_argument_types():
            if name in field_types(StageDeploy):
                raise ConfigError(f"{who}: is set per stage: --stage NAME.{name}=VALUE")
            known = (*limits, *engine_argument_types())
            raise ConfigError(f"{who}: unknown option {name!r}{did_you_mean(name, known)}")
        stages = stages_meant_by(name, pipeline)
        if not stages:
            raise ConfigError(f"{who}: no stage of this model takes it")
        for stage in stages:
            # Each stage its own copy: vLLM writes into the objects it is given.
            yield Setting((STAGES, stage, name), copy.deepcopy(value), who)


class _Merge:
    """Settings of every layer, checked; a later one wins."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._pipeline = pipeline
        self._schema = Schema(pipeline)
        self._values: Values = {}
        self._sources: dict[tuple[str, ...], str] = {}

    def add(
        self, settings: Iterable[Setting], *, by_family: bool = False, once: bool = False
    ) -> None:
        """Add a layer. `once`: a field may be set only one time in it, under whatever name."""
        seen: dict[tuple[str, ...], Setting] = {}
        for setting in settings:
            if self._schema.is_empty_stage(setting):
                continue
            field = self._schema.field(setting, by_family=by_family)
            value = self._schema.value(setting, field)
            if field.inside:
                value = self._with_part(setting, field.key, field.inside, value)
                value = self._schema.value(
                    dataclasses.replace(setting, value=value), dataclasses.replace(field, inside=())
                )
            if once and field.key in seen:
                raise ConfigError(
                    f"{setting.source}: {setting.dotted} is already set as "
                    f"{seen[field.key].dotted} ({seen[field.key].source})"
                )
            seen[field.key] = setting
            self._values[field.key] = value
            self._sources[field.key] = setting.source

    def _with_part(
        self, setting: Setting, key: tuple[str, ...], inside: tuple[str, ...], value: object
    ) -> dict[str, object]:
        """The mapping at `key` with one value inside it replaced."""
        whole = self._values.get(key) or {}
        if not isinstance(whole, Mapping):
            raise ConfigError(
                f"{setting.source}: {setting.dotted} is part of {'.'.join(key)}, which "
                f"{self._sources[key]} set as a whole"
            )
        name, *deeper = inside
        merged = dict(whole)
        part = _parsed(value)
        for below in reversed(deeper):
            part = {below: part}
        if deeper and isinstance(merged.get(name), Mapping) and isinstance(part, dict):
            part = _merged(merged[name], part)
        merged[name] = part
        return merged

    def finish(self, model_dir: Path, platform: Platform) -> ResolvedConfig:
        """Place the stages and freeze everything."""
        stages = tuple(
            ResolvedStage(
                stage_id=i,
                config=config,
                deploy=_build(
                    StageDeploy,
                    self._fields((STAGES, config.name), StageDeploy)
                    | {ENGINE_ARGS: self._below((STAGES, config.name, ENGINE_ARGS))},
                ),
                model_dir=stage_dir(model_dir, config),
            )
            for i, config in enumerate(self._pipeline.stages)
        )
        check_weights(model_dir, self._pipeline, _without_weights(stages))
        placed, decided = place(stages, platform)
        provenance = {".".join(key): source for key, source in self._sources.items()}
        return ResolvedConfig(
            model_dir=model_dir,
            pipeline=self._pipeline,
            stages=placed,
            limits=_build(ServerLimits, self._fields((LIMITS,), ServerLimits)),
            provenance=provenance | decided,
        )

    def _below(self, prefix: tuple[str, ...]) -> dict[str, object]:
        depth = len(prefix)
        return {key[depth]: v for key, v in self._values.items() if key[:depth] == prefix}

    def _fields(self, prefix: tuple[str, ...], cls: type) -> dict[str, object]:
        known, depth = field_types(cls), len(prefix) + 1
        return {
            key[-1]: value
            for key, value in self._values.items()
            if key[:-1] == prefix and len(key) == depth and key[-1] in known
        }


def _build(cls: Callable[..., T], fields: Mapping[str, object]) -> T:
    """A config object from fields that the schema has checked."""
    return cls(**fields)


def _without_weights(stages: Sequence[ResolvedStage]) -> list[str]:
    return [
        stage.config.name
        for stage in stages
        if stage.deploy.engine_args.get("load_format") == "dummy"
    ]


def _parsed(value: object) -> object:
    """Text below a mapping has no declared type: JSON where it is JSON, text otherwise."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _merged(older: object, newer: Mapping[str, object]) -> dict[str, object]:
    assert isinstance(older, Mapping), "only mappings are merged"
    result = dict(older)
    for name, value in newer.items():
        both = isinstance(result.get(name), Mapping) and isinstance(value, Mapping)
        result[name] = _merged(result[name], value) if both else value  # type: ignore[arg-type]
    return result
