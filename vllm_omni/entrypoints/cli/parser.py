"""vLLM's argument parser with errors of one line that name the nearest flag."""

from __future__ import annotations

from typing import Final, NoReturn

from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni.config.suggestions import nearest
from vllm_omni.entrypoints.cli.usage import UsageError

_UNRECOGNIZED: Final = "unrecognized arguments: "


class OmniArgumentParser(FlexibleArgumentParser):
    """Its subparsers are of the same class; all flags of one command line are known to `root`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.flags_below: list[OmniArgumentParser] = []
        """Subparsers whose flags an error of this parser may suggest."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message + self._suggestions(message))

    def option_names(self) -> list[str]:
        """Every flag of this parser and of those below."""
        below = [name for parser in self.flags_below for name in parser.option_names()]
        return [*self._option_string_actions, *below]

    def _suggestions(self, message: str) -> str:
        if not message.startswith(_UNRECOGNIZED):
            return ""
        words = message.removeprefix(_UNRECOGNIZED).split()
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        found = [near for flag in flags if (near := nearest(flag, self.option_names()))]
        return f"; did you mean {', '.join(found)}?" if found else ""
