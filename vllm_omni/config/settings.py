"""One setting an operator or a family made, before it is checked and merged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    key: tuple[str, ...]
    """`("limits", "max_in_flight")`, `("stages", "thinker", "engine_args", "dtype")`."""
    value: object
    source: str
    """Who set it, as a message shows it: `deploy.yaml:12`, `--max-model-len`."""

    @property
    def dotted(self) -> str:
        return ".".join(self.key)
