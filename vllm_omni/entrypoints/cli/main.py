"""The command line: `vllm serve MODEL --omni` (vLLM calls `main`) and `vllm-omni`.

Everything an operator can get wrong ends here as one line on standard error and a non-zero
exit, before a process was started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Final

from vllm_omni.entrypoints.cli.usage import UsageError
from vllm_omni.errors import OmniError
from vllm_omni.version import check_vllm

USAGE_EXIT: Final = 2
_INTERRUPTED_EXIT: Final = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; leaves by `SystemExit` when it fails."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        check_vllm()
        _command(arguments)(arguments)
    except OmniError as exc:
        print(f"vllm-omni: error: {_one_line(exc)}", file=sys.stderr)
        raise SystemExit(USAGE_EXIT if isinstance(exc, UsageError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED_EXIT) from None


def _command(argv: list[str]) -> Callable[[list[str]], None]:
    """The command an argument list names; imports only what that command needs."""
    words = [word for word in argv if word != "--omni"][:1]
    if words == ["demo-model"]:
        from vllm_omni.entrypoints.cli.demo_model import run

        return run
    if words == ["config"]:
        from vllm_omni.entrypoints.cli.explain import run

        return run
    if words == ["serve"]:
        from vllm_omni.entrypoints.cli.serve import run

        return run
    if words in (["--version"], ["-v"]):
        return _print_versions
    from vllm_omni.entrypoints.cli.others import run

    return run


def _print_versions(argv: list[str]) -> None:
    from vllm_omni.version import __version__, installed_vllm

    print(f"vllm-omni {__version__} (vLLM {installed_vllm()})")


def _one_line(exc: OmniError) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__


if __name__ == "__main__":
    main()
