"""`config explain MODEL [flags of serve]`: every resolved value and who set it."""

from __future__ import annotations

import json
from typing import Final

from vllm_omni.config.explain import explain, render
from vllm_omni.entrypoints.cli.serve import parse, resolved
from vllm_omni.entrypoints.cli.usage import UsageError

_USAGE: Final = "vllm-omni config explain MODEL [flags of serve] [--json] [--all]"
_SWITCHES: Final = (
    ("--json", "config explain: print JSON, one list of key, value and source."),
    ("--all", "config explain: also what vLLM decides by itself."),
)


def run(argv: list[str]) -> None:
    """Print the table; nothing is started or loaded."""
    words = [word for word in argv if word != "--omni"][1:]
    if words[:1] in (["-h"], ["--help"]):
        print(f"usage: {_USAGE}")
        return
    if words[:1] != ["explain"]:
        raise UsageError(f"usage: {_USAGE}")
    command = parse(["serve", *words[1:]], _SWITCHES)
    explained = explain(resolved(command), with_vllm_defaults=command.args.all)
    if command.args.json:
        print(json.dumps([one.as_json() for one in explained], indent=2))
    else:
        print(render(explained))
