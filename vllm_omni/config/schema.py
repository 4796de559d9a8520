"""Which settings exist, where each belongs, and of what type: the strict part of the merge."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from vllm_omni.config.deploy import ServerLimits, StageDeploy
from vllm_omni.config.engine_options import ALIASES, REFUSED, normalized, option_types
from vllm_omni.config.pipeline import PipelineConfig, StageConfig, StageKind
from vllm_omni.config.settings import Setting
from vllm_omni.config.suggestions import did_you_mean
from vllm_omni.config.values import convert
from vllm_omni.errors import ConfigError

LIMITS: Final = "limits"
STAGES: Final = "stages"
ENGINE_ARGS: Final = "engine_args"

_MEDIA_FETCH: Final = ("deny", "public")
_RESUBMIT: Final = ("live", "wait", "never")
_MAY_BE_ZERO: Final = frozenset(
    {"drain_timeout_s", "replica_drain_timeout_s", "stall_timeout_s", "max_restarts"}
)
_HOST: Final = re.compile(r"(?=[^.]*\.)[A-Za-z0-9.:*-]+")
"""A host name or address. The dot tells it from a misspelt keyword."""


@functools.cache
def field_types(cls: type) -> Mapping[str, object]:
    """Settable fields of a config class and their types."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.name != ENGINE_ARGS}


def limit_flag(name: str) -> str:
    """`--request-timeout` for `request_timeout_s`: flags leave the unit of seconds out."""
    return "--" + name.removesuffix("_s").replace("_", "-")


@dataclass(frozen=True, slots=True)
class Field:
    """One setting that exists."""

    key: tuple[str, ...]
    """Where it belongs; flat engine options and aliases are moved there."""
    hint: object
    inside: tuple[str, ...] = ()
    """Names below a mapping value, when only a part of it is set."""

    @property
    def name(self) -> str:
        return self.key[-1]


class Schema:
    """The settings of one pipeline."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._stages = {stage.name: stage for stage in pipeline.stages}

    def field(self, setting: Setting, *, by_family: bool = False) -> Field:
        """The field that a setting means.

        Raises:
            ConfigError: there is none; names the path, its source and the nearest known name.
        """
        section, *rest = setting.key
        if section == LIMITS:
            return self._limit(setting, rest)
        if section == STAGES:
            return self._stage_field(setting, rest, by_family)
        raise self._unknown(setting, 0, (LIMITS, STAGES))

    def is_empty_stage(self, setting: Setting) -> bool:
        """Whether a stage is named and nothing of it is set.

        Raises:
            ConfigError: there is no such stage.
        """
        if setting.value is not None or setting.key[0] != STAGES or len(setting.key) != 2:
            return False
        if setting.key[1] not in self._stages:
            raise self._unknown(setting, 1, self._stages)
        return True

    def value(self, setting: Setting, field: Field) -> object:
        """The setting's value, converted and in range.

        Raises:
            ConfigError: names the path and its source.
        """
        try:
            value = normalized(field.name, setting.value)
            if not field.inside:
                value = convert(value, field.hint)
            _check_range(field, value)
        except ValueError as exc:
            raise ConfigError(f"{setting.source}: {setting.dotted} {exc}") from exc
        return value

    def _limit(self, setting: Setting, rest: list[str]) -> Field:
        known = field_types(ServerLimits)
        if len(rest) != 1 or rest[0] not in known:
            raise self._unknown(setting, 1, known)
        return Field(setting.key, known[rest[0]])

    def _stage_field(self, setting: Setting, rest: list[str], by_family: bool) -> Field:
        if not rest or rest[0] not in self._stages:
            raise self._unknown(setting, 1, self._stages)
        if len(rest) == 1:
            raise ConfigError(f"{setting.source}: {setting.dotted} must be a mapping of settings")
        stage = self._stages[rest[0]]
        flat = rest[1] != ENGINE_ARGS
        path = rest[1:] if flat else rest[2:]
        if not path:
            raise ConfigError(f"{setting.source}: {setting.dotted} must be a mapping of settings")
        return self._located(setting, stage, path, flat=flat, by_family=by_family)

    def _located(
        self,
        setting: Setting,
        stage: StageConfig,
        path: list[str],
        *,
        flat: bool,
        by_family: bool,
    ) -> Field:
        name, *inside = path
        own = field_types(StageDeploy)
        prefix = (STAGES, stage.name)
        is_ar = stage.kind is StageKind.AUTOREGRESSIVE
        if is_ar and name in ALIASES:
            name, flat = ALIASES[name], True
        if flat and name in own:
            if inside:
                raise self._unknown(setting, 3, ())
            return Field((*prefix, name), own[name])
        options = option_types(stage)
        if name not in options:
            known = {*options, *own} if flat else options
            raise self._unknown(setting, len(setting.key) - len(path), known)
        if is_ar and name in REFUSED and not by_family:
            raise ConfigError(f"{setting.source}: {setting.dotted} cannot be set: {REFUSED[name]}")
        return Field((*prefix, ENGINE_ARGS, name), options[name], tuple(inside))

    def _unknown(self, setting: Setting, position: int, known: Iterable[str]) -> ConfigError:
        names = sorted(known)
        if position >= len(setting.key):
            return ConfigError(f"{setting.source}: {setting.dotted} must be a mapping of settings")
        hint = did_you_mean(setting.key[position], names)
        if not hint and 0 < len(names) <= 24:
            hint = f"; known: {', '.join(names)}"
        return ConfigError(f"{setting.source}: unknown setting {setting.dotted!r}{hint}")


def _check_range(field: Field, value: object) -> None:
    """Bounds of our own fields; vLLM checks its own."""
    if ENGINE_ARGS in field.key or isinstance(value, bool):
        return
    if field.name in _MAY_BE_ZERO and value == 0:
        return
    if field.name == "media_fetch":
        _check_media_fetch(str(value))
    elif field.name == "resubmit" and value not in _RESUBMIT:
        raise ValueError(f"must be one of {', '.join(_RESUBMIT)}, got {value!r}")
    elif isinstance(value, int) and value < 1:
        raise ValueError(f"must be at least 1, got {value}")
    elif isinstance(value, float):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"must be above 0 and finite, got {value}")
        if field.name == "memory_fraction" and value > 1:
            raise ValueError(f"must be at most 1, got {value}")


def _check_media_fetch(value: str) -> None:
    if value in _MEDIA_FETCH:
        return
    for host in value.split(","):
        if not _HOST.fullmatch(host.strip()):
            raise ValueError(
                f"must be deny, public or host names separated by commas, got {value!r}"
                f"{did_you_mean(value, _MEDIA_FETCH)}"
            )
