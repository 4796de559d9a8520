"""The one error that is about the command line itself."""

from __future__ import annotations

from vllm_omni.errors import ConfigError


class UsageError(ConfigError):
    """The command line cannot be parsed."""
