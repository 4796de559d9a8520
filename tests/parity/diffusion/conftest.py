"""Tiny models of diffusion take one thread."""

from __future__ import annotations

from tests.threads import one_thread

__all__ = ["one_thread"]
