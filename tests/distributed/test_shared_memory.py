"""Segments without a name: sealed, pooled, bounded."""

from __future__ import annotations

import mmap
import os

import pytest

from vllm_omni.distributed.omni_connectors.shared_memory import (
    MIN_SLOT_BYTES,
    SEGMENT_BYTES,
    SlotPool,
    create_segment,
    open_segment,
)


def test_a_segment_opened_through_proc_shows_what_is_written() -> None:
    segment = create_segment(4096)
    opened = open_segment(os.getpid(), segment.fd, 4096)
    segment.view[:5] = b"hello"

    assert bytes(opened[:5]) == b"hello"
    assert opened.readonly
    os.close(segment.fd)


def test_nobody_else_can_write_or_shrink_a_segment() -> None:
    segment = create_segment(4096)
    with pytest.raises(PermissionError):
        mmap.mmap(segment.fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    os.close(segment.fd)


def test_memory_that_could_shrink_under_the_reader_is_refused() -> None:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(OSError, match="not sealed"):
        open_segment(os.getpid(), fd, 4096)
    os.close(fd)


def test_a_segment_smaller_than_announced_is_refused() -> None:
    segment = create_segment(4096)
    with pytest.raises(OSError, match="smaller"):
        open_segment(os.getpid(), segment.fd, 8192)
    os.close(segment.fd)


def test_slots_are_used_again_before_new_ones() -> None:
    pool = SlotPool()
    first = pool.put(b"x" * 100)
    assert first is not None
    pool.free(first.slot_id)

    assert pool.put(b"y" * 100) == first
    pool.close()


def test_slots_never_overlap() -> None:
    pool = SlotPool()
    slots = [pool.put(bytes([i]) * MIN_SLOT_BYTES) for i in range(200)]

    for i, slot in enumerate(slots):
        assert slot is not None
        view = pool.segments[slot.segment].view
        assert (
            bytes(view[slot.offset : slot.offset + MIN_SLOT_BYTES]) == bytes([i]) * MIN_SLOT_BYTES
        )
    pool.close()


def test_a_pool_that_is_full_gives_none_and_larger_slots_first() -> None:
    pool = SlotPool(max_bytes=SEGMENT_BYTES)
    large = pool.put(bytes(SEGMENT_BYTES))
    assert large is not None
    assert pool.put(b"small") is None
    pool.free(large.slot_id)

    assert pool.put(b"small") == large
    pool.close()
