"""Every resolved value and who set it: what `vllm-omni config explain` prints."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vllm_omni.config.deploy import ResolvedConfig
from vllm_omni.config.engine_options import engine_argument_defaults
from vllm_omni.config.pipeline import StageKind
from vllm_omni.config.schema import ENGINE_ARGS, LIMITS, STAGES

DEFAULT: str = "default"
VLLM_DEFAULT: str = "vLLM default"


@dataclass(frozen=True, slots=True)
class Explained:
    """One resolved value."""

    key: str
    value: object
    source: str

    def as_json(self) -> dict[str, object]:
        return {"key": self.key, "value": plain(self.value), "source": self.source}


def explain(config: ResolvedConfig, *, with_vllm_defaults: bool = False) -> list[Explained]:
    """All values of a config; with `with_vllm_defaults` also what vLLM decides by itself."""
    values = dict(_values(config))
    found = [Explained(k, v, config.provenance.get(k, DEFAULT)) for k, v in values.items()]
    if with_vllm_defaults:
        for stage in config.stages:
            if stage.config.kind is StageKind.AUTOREGRESSIVE:
                prefix = f"{STAGES}.{stage.config.name}.{ENGINE_ARGS}"
                found += [
                    Explained(f"{prefix}.{name}", value, VLLM_DEFAULT)
                    for name, value in engine_argument_defaults().items()
                    if f"{prefix}.{name}" not in values
                ]
    return sorted(found, key=lambda one: _order(one.key))


def render(explained: list[Explained]) -> str:
    """A table with one line for each value."""
    keys = [one.key for one in explained]
    values = [shown(one.value) for one in explained]
    key_width = max(map(len, keys), default=0)
    value_width = min(40, max(map(len, values), default=0))
    return "\n".join(
        f"{key:<{key_width}}  {value:<{value_width}}  {one.source}"
        for key, value, one in zip(keys, values, explained, strict=True)
    )


def shown(value: object) -> str:
    """A value on one line."""
    text = str(plain(value)) if not isinstance(value, str) else value or "''"
    return " ".join(text.split())


def plain(value: object) -> object:
    """A value as JSON has it."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def _values(config: ResolvedConfig) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(config.limits):
        yield f"{LIMITS}.{field.name}", getattr(config.limits, field.name)
    for stage in config.stages:
        prefix = f"{STAGES}.{stage.config.name}"
        for field in dataclasses.fields(stage.deploy):
            if field.name != ENGINE_ARGS:
                yield f"{prefix}.{field.name}", getattr(stage.deploy, field.name)
        for name, value in stage.deploy.engine_args.items():
            yield f"{prefix}.{ENGINE_ARGS}.{name}", value


def _order(key: str) -> tuple[str, ...]:
    section, name, *rest = key.split(".")
    return (section, name, str(ENGINE_ARGS in rest), *rest)
