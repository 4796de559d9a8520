"""Pooled shared memory without names: memfd segments that the peer opens through /proc.

The sender's pool cuts segments into slots, hands them out and takes them back; nothing is created
or locked per chunk. Segments are sealed against shrinking (a receiver cannot be made to fault) and
against writing by anyone else. They vanish with the last process that maps them.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from dataclasses import dataclass

from vllm_omni.distributed.omni_connectors.base import Buffer

logger = logging.getLogger(__name__)

MIN_SLOT_BYTES = 64 * 1024
SEGMENT_BYTES = 8 * 1024 * 1024
"""Smallest segment; a larger slot gets a segment of its own."""
MAX_POOL_BYTES = 256 * 1024 * 1024

_F_SEAL_FUTURE_WRITE = 0x0010
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one payload."""

    slot_id: int
    segment: int
    offset: int
    capacity: int


@dataclass(frozen=True, slots=True)
class PoolSegment:
    fd: int
    size_bytes: int
    view: memoryview


def create_segment(size_bytes: int) -> PoolSegment:
    """A sealed memfd, mapped writable here and nowhere else.

    Raises:
        OSError: no memory, address space or descriptor is left for it.
    """
    fd = os.memfd_create("vllm-omni", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        # Now, not at the first write, where a lack of memory would be a signal.
        os.posix_fallocate(fd, 0, size_bytes)
        view = memoryview(mmap.mmap(fd, size_bytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return PoolSegment(fd, size_bytes, view)


def open_segment(pid: int, fd: int, size_bytes: int) -> memoryview:
    """Map a segment of another process, read-only.

    Raises:
        OSError: it is not there, not ours to open, too small, or not sealed.
    """
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if fcntl.fcntl(own, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("segment is not sealed")
        if os.fstat(own).st_size < size_bytes:
            raise OSError("segment is smaller than announced")
        return memoryview(mmap.mmap(own, size_bytes, prot=mmap.PROT_READ))
    finally:
        os.close(own)


class SlotPool:
    """The sender's slots. Not thread-safe: its owner holds a lock."""

    def __init__(self, max_bytes: int = MAX_POOL_BYTES) -> None:
        self.segments: list[PoolSegment] = []
        self._max_bytes = max_bytes
        self._slots: list[Slot] = []
        self._free: dict[int, list[Slot]] = {}
        """By capacity; last in, first out, so that a slot is used while its memory is warm."""
        self._num_used = 0
        self._is_refused = False
        """The last segment could not be made, and that was said."""

    def __repr__(self) -> str:
        return f"<SlotPool used={self._num_used} of {len(self._slots)}>"

    def put(self, payload: Buffer) -> Slot | None:
        """Copy a payload into a slot; None when the pool is exhausted or memory is."""
        data = memoryview(payload).cast("B")
        slot = self._take(data.nbytes)
        if slot is not None:
            self.segments[slot.segment].view[slot.offset : slot.offset + data.nbytes] = data
        return slot

    def free(self, slot_id: int) -> None:
        slot = self._slots[slot_id]
        self._free[slot.capacity].append(slot)
        self._num_used -= 1

    def close(self) -> None:
        """Give the memory back; receivers keep what they have mapped until they let go."""
        for segment in self.segments:
            os.close(segment.fd)
        self.segments.clear()
        self._slots.clear()
        self._free.clear()

    def _take(self, size_bytes: int) -> Slot | None:
        capacity = max(MIN_SLOT_BYTES, 1 << (size_bytes - 1).bit_length())
        if not self._free.get(capacity) and not self._grow(capacity):
            larger = [size for size, slots in self._free.items() if slots and size > capacity]
            if not larger:
                return None
            capacity = min(larger)
        self._num_used += 1
        return self._free[capacity].pop()

    def _grow(self, capacity: int) -> bool:
        size_bytes = max(SEGMENT_BYTES, capacity)
        if sum(segment.size_bytes for segment in self.segments) + size_bytes > self._max_bytes:
            return False
        try:
            segment = create_segment(size_bytes)
        except OSError as error:
            if not self._is_refused:
                logger.warning("no shared memory, payloads travel in messages: %s", error)
            self._is_refused = True
            return False
        self._is_refused = False
        number = len(self.segments)
        self.segments.append(segment)
        slots = [
            Slot(len(self._slots) + i, number, offset, capacity)
            for i, offset in enumerate(range(0, size_bytes, capacity))
        ]
        self._slots += slots
        self._free.setdefault(capacity, []).extend(reversed(slots))
        return True
