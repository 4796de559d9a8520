"""`serve`: vLLM's own parser with our group, then our server or, for a plain model, vLLM's."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import ValidationError
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.exceptions import VLLMError
from vllm.logger import configure_logging_from_args

from vllm_omni import envs
from vllm_omni.config.deploy import ResolvedConfig
from vllm_omni.config.detect import detect, locate
from vllm_omni.config.resolve import resolve
from vllm_omni.engine.interpreter import take_short_turns
from vllm_omni.entrypoints.cli.heap import bound_heaps
from vllm_omni.entrypoints.cli.logs import share_vllm_logging
from vllm_omni.entrypoints.cli.omni_args import (
    add_omni_arguments,
    gathered,
    given,
    refuse_impossible,
    refuse_omni_flags,
    server_options,
    without_omni,
)
from vllm_omni.entrypoints.cli.parser import OmniArgumentParser
from vllm_omni.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """A parsed `serve` command line."""

    args: argparse.Namespace
    given: dict[str, object]
    """Flags that the user gave, without any default."""

    @property
    def model(self) -> str:
        """The model as the user named it."""
        if "model_tag" not in self.given and "model" not in self.given:
            raise ConfigError("name a model: vllm serve MODEL --omni")
        return str(self.args.model)

    @property
    def revision(self) -> str | None:
        value = self.given.get("revision")
        return None if value is None else str(value)


def run(argv: list[str]) -> None:
    """Serve until stopped."""
    cli_env_setup()
    command = parse(argv)
    configure_logging_from_args(command.args)
    share_vllm_logging()
    with _argument_errors():
        ServeSubcommand().validate(command.args)
    model_dir = locate(command.model, command.revision)
    if detect(model_dir) is None:
        refuse_omni_flags(command.given, command.model)
        try:
            ServeSubcommand.cmd(without_omni(command.args))
        except ValidationError as exc:  # vLLM's configs are pydantic's: raised before it serves
            raise ConfigError(f"{command.model!r} cannot be served: {_reason(exc)}") from exc
        return
    _serve(command.args, resolved(command))


def parse(argv: Sequence[str], more: Sequence[tuple[str, str]] = ()) -> ServeCommand:
    """Parse what follows the program's name; `more` are switches with their help.

    Raises:
        UsageError: a flag or value is unknown; names the nearest.
    """
    root = OmniArgumentParser(description="vLLM for models of several stages", prog="vllm-omni")
    serve = ServeSubcommand().subparser_init(root.add_subparsers(dest="subparser"))
    add_omni_arguments(serve)
    for name, text in more:
        serve.add_argument(name, action="store_true", default=False, help=text)
    root.flags_below.append(serve)
    words = gathered([word for word in argv if word != "--omni"])
    with _argument_errors():
        args = root.parse_args(words)
    named = given(root, serve, args, words)
    named.pop("subparser", None)
    args.omni = True
    if args.model_tag is not None:
        args.model = args.model_tag
    else:
        named.pop("model_tag", None)
    return ServeCommand(args, named)


def resolved(command: ServeCommand) -> ResolvedConfig:
    """The resolved configuration of a command for a model of several stages.

    Raises:
        ConfigError: a flag, key or value is unknown or impossible.
    """
    refuse_impossible(command.given)
    return resolve(
        command.model,
        deploy_config=command.args.deploy_config,
        cli=server_options(command.given),
        stage_overrides=command.args.stage,
    )


def _serve(args: argparse.Namespace, config: ResolvedConfig) -> None:
    import uvloop

    from vllm_omni.entrypoints.openai.server import serve

    bound_heaps()
    take_short_turns()
    # Out of the arguments, which vLLM writes to the log.
    admin_key = vars(args).pop("admin_api_key") or envs.admin_api_key()
    uvloop.run(serve(args, config, admin_key, vars(args).pop("data_dir")))


def _reason(exc: ValidationError) -> str:
    """What is wrong with one of vLLM's configs, without pydantic's words around it."""
    first = exc.errors()[0]
    return str(first["msg"]).removeprefix("Value error, ")


@contextmanager
def _argument_errors() -> Iterator[None]:
    """vLLM refuses some arguments by exceptions of its own."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError, AssertionError, OSError, VLLMError) as exc:
        raise ConfigError(str(exc).removeprefix("Error: ")) from exc
