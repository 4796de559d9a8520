"""Encoded prompts kept for the next request with the same ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass


class ConditioningCache:
    """Least recently used first out, bounded by the bytes that the entries hold.

    Keys hold the texts themselves and digests of images, so equal keys mean equal conditioning.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0

    def __repr__(self) -> str:
        return f"<ConditioningCache entries={len(self)} bytes={self.num_bytes}/{self._max_bytes}>"

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> object | None:
        """The conditioning of that key, which is now the most recently used; None: not here."""
        entry = self._entries.get(key)
        if entry is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, conditioning: object, num_bytes: int) -> None:
        """Keep it, and drop what was not used for longest until the bound holds."""
        if num_bytes > self._max_bytes or key in self._entries:
            return
        self._entries[key] = conditioning, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            _, (_, dropped_bytes) = self._entries.popitem(last=False)
            self.num_bytes -= dropped_bytes

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.num_bytes = 0


def tensor_bytes(value: object) -> int:
    """Bytes of all tensors in a value: dataclasses, mappings, sequences and tensors themselves."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.element_size() * value.nelement()
    if isinstance(value, Mapping):
        return sum(tensor_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(tensor_bytes(item) for item in value)
    if is_dataclass(value):
        return sum(tensor_bytes(getattr(value, field.name)) for field in fields(value))
    return 0
