"""Bounds on the heaps of the API process: in an interpreter of its own, as they stay for good."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vllm_omni.entrypoints.cli.heap import MAX_HEAPS, bound_heaps

_PROGRAM = """
import ctypes, json, os, re, sys, threading
from vllm_omni.entrypoints.cli.heap import MAPPED_FROM_BYTES, bound_heaps

if sys.argv[1] == "bound":
    assert bound_heaps({})
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = (
    ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p])
c.fopen.restype, c.malloc_info.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
c.fclose.argtypes = [ctypes.c_void_p]

def state():
    path = f"/proc/self/fd/{os.memfd_create('heaps')}"
    file = c.fopen(path.encode(), b"w")
    c.malloc_info(0, file)
    c.fclose(file)
    text = open(path).read()
    mapped = re.search(r'<total type="mmap" count="(\\d+)"', text)[1]
    return len(re.findall("<heap ", text)), int(mapped)

all_there = threading.Barrier(9)
def work():
    c.free(c.malloc(1000))
    all_there.wait()
    all_there.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
all_there.wait()
num_heaps, _ = state()
all_there.wait()
c.free(c.malloc(16 << 20))  # from now on glibc would keep blocks up to this size in its heaps
_, before = state()
blocks = [c.malloc(2 * MAPPED_FROM_BYTES) for _ in range(4)]
_, after = state()
print(json.dumps([num_heaps, after - before]))
"""


def heaps_and_mapped(mode: str) -> list[int]:
    """Heaps for nine threads, and how many of four large blocks are mapped by themselves."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, mode], capture_output=True, text=True, check=True
    )
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_few_heaps_and_large_blocks_go_back() -> None:
    num_heaps, num_mapped = heaps_and_mapped("bound")
    assert num_heaps <= MAX_HEAPS
    assert num_mapped == 4

    num_heaps, num_mapped = heaps_and_mapped("as it is")
    assert num_heaps > MAX_HEAPS, "glibc has this bound itself: the module can go"
    assert num_mapped == 0


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_an_operators_options_stand(name: str) -> None:
    assert not bound_heaps({name: "4"})
