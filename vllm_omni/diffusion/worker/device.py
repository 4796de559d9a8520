"""The device of one rank: how work on it begins, and how its end is awaited."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Literal

import torch

from vllm_omni.platforms import platform_of


class Device:
    """One device by its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._platform = platform_of(name)
        self._platform.prepare_process()
        self._turn = threading.RLock() if name == "cpu" else None
        """A processor computes for one lane at a time: two with a team of threads each would take
        the same cores from each other."""

    def __repr__(self) -> str:
        return f"<Device {self.name}>"

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Around everything a thread computes: nothing is kept for gradients."""
        turn = self._turn or contextlib.nullcontext()
        with turn, self._platform.using(self.name), torch.inference_mode():
            yield

    def limit_memory(self, fraction: float) -> None:
        """Have allocations beyond this share of the device's memory fail."""
        self._platform.limit_memory(self.name, fraction)

    def fence(self) -> Callable[[], None]:
        """Mark what was put on the device so far; the answer waits for it."""
        return self._platform.fence(self.name)

    def dtype(self, name: Literal["auto", "float32", "bfloat16", "float16"]) -> torch.dtype:
        """The type that an option names."""
        if name == "auto":
            return torch.float32 if self.name == "cpu" else torch.bfloat16
        dtype: torch.dtype = getattr(torch, name)
        return dtype
