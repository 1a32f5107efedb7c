"""What malloc is told of its heaps, in a process of its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="heaps are glibc's")

GIVES_BACK = """
import ctypes
from banaserve.base.platform import linux

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = (ctypes.c_void_p,)

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

blocks = [libc.malloc(4000) for _ in range(20_000)]
for block in blocks:
    ctypes.memset(block, 1, 4000)
for block in blocks[:-1]:  # the last one keeps the heap's end in use
    libc.free(block)
before = resident_bytes()
linux.give_back_heaps()
print(before - resident_bytes())
"""

COUNTS_HEAPS = """
import ctypes, re, threading
from banaserve.base.platform import linux

assert linux.limit_heaps(2)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
here = threading.Barrier(6)

def allocate():
    libc.malloc(1000)
    here.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
stream = libc.fdopen
stream.restype = ctypes.c_void_p
file = stream(1, b"w")
libc.malloc_info.argtypes = (ctypes.c_int, ctypes.c_void_p)
libc.malloc_info(0, file)
libc.fflush.argtypes = (ctypes.c_void_p,)
libc.fflush(file)
"""


def said(script: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"},
    )
    return done.stdout


def test_free_memory_between_used_goes_back() -> None:
    assert int(said(GIVES_BACK)) > 40_000_000


def test_threads_share_as_many_heaps_as_are_allowed() -> None:
    heaps = said(COUNTS_HEAPS).count("<heap nr=")
    assert heaps == 2
    free = said(COUNTS_HEAPS.replace("assert linux.limit_heaps(2)", "")).count("<heap nr=")
    assert free > 2
