"""The flags that `--omni` adds to vLLM's `serve`, and which of all flags the user gave."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from vllm_omni.config.deploy import ServerLimits
from vllm_omni.config.engine_options import engine_argument_types
from vllm_omni.config.schema import field_types, limit_flag
from vllm_omni.config.values import convert
from vllm_omni.errors import ConfigError

GROUP: Final = "Omni"
STAGE_FLAG: Final = "--stage"
OWN: Final = ("omni", "deploy_config", "stage", "admin_api_key", "data_dir")
"""Flags of this group that are no limits."""

IMPOSSIBLE: Final[Mapping[str, str]] = {
    "api_server_count": "one API process holds the orchestrator of all stages",
    "headless": "replicas run on the host of the API process",
    "grpc": "the server speaks HTTP only",
    "grpc_port": "the server speaks HTTP only",
    "enable_scale_out": "stages are fed by the orchestrator",
}
"""Flags of vLLM's server that cannot work with several stages."""


class _ArgumentGroup(Protocol):
    def add_argument(self, *names: str, **options: object) -> object: ...


class _Parser(Protocol):
    def add_argument_group(self, title: str, description: str) -> _ArgumentGroup: ...


class _NotGiven(list[object]):
    """A default that no user can give. A list, since repeatable flags append to their default."""


NOT_GIVEN: Final = _NotGiven()


def gathered(words: Sequence[str]) -> list[str]:
    """`--stage A ... --stage B` as one `--stage A B` at the end: vLLM warns of repeated flags."""
    rest: list[str] = []
    values: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name != STAGE_FLAG:
            rest.append(word)
        elif equals:
            values.append(value)
        elif (following := next(remaining, None)) is not None:
            values.append(following)
        else:
            rest.append(word)
    return [*rest, STAGE_FLAG, *values] if values else rest


def add_omni_arguments(parser: _Parser) -> None:
    """Add the group to vLLM's `serve` parser."""
    group = parser.add_argument_group(
        GROUP, "Models of several stages: where and how each stage runs, and what is taken on."
    )
    group.add_argument(
        "--omni", action="store_true", default=False, help="Serve a model of several stages."
    )
    group.add_argument(
        "--deploy-config",
        metavar="FILE",
        default=None,
        help="YAML with `limits:` and `stages:`, instead of the one shipped for the model.",
    )
    group.add_argument(
        STAGE_FLAG,
        metavar="NAME.FIELD=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="One setting of one stage, for example `thinker.max_model_len=2048`. Repeatable.",
    )
    group.add_argument(
        "--admin-api-key",
        metavar="KEY",
        default=None,
        help="Key of operators, for the routes below /v1/omni/; without one they are off. Better "
        "given as VLLM_OMNI_ADMIN_API_KEY, which no process list shows.",
    )
    group.add_argument(
        "--data-dir",
        metavar="FOLDER",
        default=None,
        help="Where videos and their jobs are kept, so that they outlive the server; one folder "
        "for each server. Also VLLM_OMNI_DATA_DIR; else a folder for the port, below "
        "$XDG_STATE_HOME or ~/.local/state.",
    )
    documented = _field_docs(ServerLimits)
    defaults = ServerLimits()
    for name, hint in field_types(ServerLimits).items():
        group.add_argument(
            limit_flag(name),
            dest=name,
            type=_parser_of(hint),
            default=getattr(defaults, name),
            metavar="SECONDS" if name.endswith("_s") else name.upper(),
            help=documented[name],
        )


def given(
    parser: argparse.ArgumentParser,
    serve: argparse.ArgumentParser,
    args: argparse.Namespace,
    argv: Sequence[str],
) -> dict[str, object]:
    """The flags that `argv` (or the file behind its `--config`) names, with their values.

    Comparing with the defaults would lose a flag that is given with its default value. Leaves
    `serve` without defaults: call it after everything else was parsed.
    """
    serve.set_defaults(**dict.fromkeys(vars(args), NOT_GIVEN))
    again = vars(parser.parse_args(list(argv)))
    return {
        name: list(value) if isinstance(value, _NotGiven) else value
        for name, value in again.items()
        if value is not NOT_GIVEN
    }


def server_options(given_flags: Mapping[str, object]) -> dict[str, object]:
    """Of the flags that were given, those that `resolve` decides on."""
    known = {*engine_argument_types(), *field_types(ServerLimits)} - {"model"}
    return {name: value for name, value in given_flags.items() if name in known}


def refuse_impossible(given_flags: Mapping[str, object]) -> None:
    """Refuse vLLM's flags that several stages cannot honour.

    Raises:
        ConfigError: names the flag and the reason.
    """
    for name, reason in IMPOSSIBLE.items():
        value = given_flags.get(name)
        if value is True or (value not in (None, False) and value != 1):
            raise ConfigError(f"--{name.replace('_', '-')} cannot be used with --omni: {reason}")


def refuse_omni_flags(given_flags: Mapping[str, object], model: str) -> None:
    """Refuse our flags for a model that vLLM serves alone.

    Raises:
        ConfigError: names the first such flag.
    """
    for name in (*OWN[1:], *field_types(ServerLimits)):
        if name in given_flags:
            flag = limit_flag(name) if name in field_types(ServerLimits) else f"--{name}"
            raise ConfigError(
                f"{flag.replace('_', '-')} needs a model of several stages; "
                f"{model!r} is served by vLLM alone"
            )


def without_omni(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments as vLLM's own `serve` knows them."""
    ours = {*OWN, *field_types(ServerLimits)}
    return argparse.Namespace(**{k: v for k, v in vars(args).items() if k not in ours})


def _parser_of(hint: object) -> object:
    def parse(text: str) -> object:
        try:
            return convert(text, hint)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc

    return parse


def _field_docs(cls: type) -> dict[str, str]:
    from vllm.config.utils import get_attr_docs

    documented = get_attr_docs(cls)
    return {f.name: " ".join(documented[f.name].split()) for f in dataclasses.fields(cls)}
