"""Skipping computation between denoise steps, by diffusers' first-block cache.

What the hooks remember belongs to a request and must neither reach another one nor stay behind,
so their one store is replaced by one with a shelf for each request. Whether to skip is decided for
a whole forward, so a stage with a step cache runs one request per forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from diffusers.hooks import FirstBlockCacheConfig
from diffusers.hooks.hooks import HookRegistry, StateManager
from diffusers.models.cache_utils import CacheMixin

from vllm_omni.errors import ConfigError

_NEVER: Final = -1.0
"""No change is below it: every block of every step is computed."""


class RequestStates(StateManager):
    """The hooks' store: what is remembered is found by request."""

    def __init__(self, state_class: Any) -> None:
        super().__init__(state_class)
        self._shelves: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        """Requests of which something is remembered."""
        return len(self._shelves)

    def open(self, request_id: str) -> None:
        """The next forward is this request's."""
        self._state_cache = self._shelves.setdefault(request_id, {})

    def forget(self, request_id: str) -> None:
        """Drop what is remembered of a request."""
        self._shelves.pop(request_id, None)


class StepCache:
    """The first-block cache of all denoisers of a pipeline."""

    def __init__(self, denoisers: Mapping[str, torch.nn.Module], threshold: float) -> None:
        """Raises ConfigError when a denoiser cannot be cached."""
        if not denoisers:
            raise ConfigError("step_cache: the model has no denoiser that can be cached")
        self._threshold = threshold
        self._stores: list[RequestStates] = []
        self._heads: list[Any] = []
        for name, module in denoisers.items():
            if not isinstance(module, CacheMixin):
                raise ConfigError(f"step_cache: {name} ({type(module).__name__}) has none")
            try:
                module.enable_cache(FirstBlockCacheConfig(threshold=threshold))
            except (ValueError, IndexError) as error:
                raise ConfigError(f"step_cache: {name}: {error}") from error
            self._take_over(module)

    def __len__(self) -> int:
        """Requests of which something is remembered."""
        return max(len(store) for store in self._stores)

    def _take_over(self, module: torch.nn.Module) -> None:
        store: RequestStates | None = None
        for part in module.modules():
            registry = getattr(part, "_diffusers_hook", None)
            if not isinstance(registry, HookRegistry):
                continue
            for hook in registry.hooks.values():
                manager = getattr(hook, "state_manager", None)
                if not isinstance(manager, StateManager):
                    continue
                if store is None:
                    store = RequestStates(manager._state_cls)
                hook.state_manager = store
                if hasattr(hook, "threshold"):
                    self._heads.append(hook)
        assert store is not None, "the cache has hooks with a store"
        self._stores.append(store)

    def begin_step(self, request_id: str, quality: str | None) -> None:
        """The next forward is this request's: `lossless` skips nothing, `high` half as easily."""
        for store in self._stores:
            store.open(request_id)
        threshold = {"lossless": _NEVER, "high": self._threshold / 2}.get(
            quality or "", self._threshold
        )
        for head in self._heads:
            head.threshold = threshold

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are over."""
        for request_id in request_ids:
            for store in self._stores:
                store.forget(request_id)
