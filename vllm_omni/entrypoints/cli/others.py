"""vLLM's other subcommands, as vLLM registers them, and the help that lists all."""

from __future__ import annotations

import importlib
import sys
from typing import Final

from vllm_omni.entrypoints.cli.parser import OmniArgumentParser

_SNAPSHOT: Final = "vllm.entrypoints.cli.snapshot"
_MODULES: Final = (
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.launch",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.collect_env",
    "vllm.entrypoints.cli.download_kernels",
    "vllm.entrypoints.cli.preload",
    "vllm.entrypoints.cli.run_batch",
    _SNAPSHOT,
)
_OURS: Final = (
    ("config", "Explain every resolved setting of a model: `config explain MODEL`."),
    ("demo-model", "Assemble a speech-to-speech model from weights of the package index."),
)


def run(argv: list[str]) -> None:
    """Run one of vLLM's subcommands, or print the help."""
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    # vLLM's subcommands look at the process's own command line.
    sys.argv[1:] = words = [word for word in argv if word != "--omni"]
    if words[:1] != ["snapshot"]:
        cli_env_setup()
    _use_cpu_for_bench(words)
    parser = OmniArgumentParser(description="vLLM for models of several stages", prog="vllm-omni")
    parser.add_argument("-v", "--version", action="store_true", help="Print both versions.")
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    commands = {}
    for module in map(importlib.import_module, _MODULES):
        create = {"create_requested": words[:2] == ["snapshot", "create"]}
        for command in module.cmd_init(**(create if module.__name__ == _SNAPSHOT else {})):
            command.subparser_init(subparsers).set_defaults(dispatch_function=command.cmd)
            commands[command.name] = command
    for name, text in _OURS:
        subparsers.add_parser(name, help=text)
    args = parser.parse_args(words)
    if args.subparser in commands:
        configure_logging_from_args(args)
        commands[args.subparser].validate(args)
        args.dispatch_function(args)
    else:
        parser.print_help()


def _use_cpu_for_bench(words: list[str]) -> None:
    """`bench` needs no device, but vLLM wants a platform."""
    if words[:1] != ["bench"]:
        return
    from vllm.entrypoints.cli.benchmark.main import maybe_exec_rust_bench

    maybe_exec_rust_bench()
    from vllm import platforms

    if platforms.current_platform.is_unspecified():
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = CpuPlatform()
