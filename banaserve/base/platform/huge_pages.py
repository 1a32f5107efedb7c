"""Huge pages for memory that is repeatedly read as a whole: weights and caches on a CPU.

Each step of an engine reads every weight. With pages of 4 KiB, a step needs hundreds of thousands
of page-table entries, and in a virtual machine each is looked up twice; with pages of 2 MiB it
needs hundreds. Most distributions give huge pages only to processes that ask (``madvise``). In a
forked process the allocator cannot ask for existing memory, so that memory is gathered into huge
pages instead (``MADV_COLLAPSE``, Linux 6.1; in older versions the kernel does it gradually).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from banaserve.base.platform.linux import madvise

VARIABLE = "THP_MEM_ALLOC_ENABLE"
"""PyTorch's variable for huge pages of its allocator; with 0, nothing is gathered either."""
PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGEMAP = Path("/proc/self/pagemap")
_ENTRY_BYTES = 8
_OWN = np.uint64(1 << 63 | 1 << 56)
"""Bits of a page that is in memory, and mapped by no other process (Linux,
admin-guide/mm/pagemap)."""
_OWN_SHARE = 0.9
"""Minimum fraction of a huge page that this process must own: gathering fills the rest with zeros,
or copies pages shared with the process that it was forked from."""
Span = tuple[int, int]
"""First address, and the address after the last one."""


def gather(enabled: Path = _ENABLED) -> int:
    """Gather this process's private memory into huge pages, if the system offers them.

    Takes about a second for 2 GiB. Threads may use the memory meanwhile.

    Returns:
        Number of bytes for which huge pages were requested.
    """
    if os.environ.get(VARIABLE) == "0" or not are_offered(enabled):
        return 0
    asked_bytes = 0
    for within in private_spans(Path("/proc/self/maps").read_text().splitlines()):
        for first, end in worth_gathering(within[0], _pages(within)):
            # On failure memory stays in small pages: no huge page is free, or the kernel is older.
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                with contextlib.suppress(OSError):
                    madvise(first, end - first, advice)
            asked_bytes += end - first
    return asked_bytes


def are_offered(enabled: Path = _ENABLED) -> bool:
    """Return whether this system offers huge pages to processes that ask."""
    try:
        return "[never]" not in enabled.read_text()
    except OSError:
        return False


def private_spans(maps: Iterable[str]) -> Iterator[Span]:
    """Yield the span of whole huge pages in each private anonymous mapping of /proc/PID/maps."""
    for line in maps:
        span, rights, _, _, inode, *_ = line.split()
        if rights != "rw-p" or inode != "0":
            continue
        first, _, end = span.partition("-")
        whole = (
            -(-int(first, 16) // PAGE_BYTES) * PAGE_BYTES,
            int(end, 16) // PAGE_BYTES * PAGE_BYTES,
        )
        if whole[0] < whole[1]:
            yield whole


def worth_gathering(first: int, pages: npt.NDArray[np.uint64]) -> Iterator[Span]:
    """Yield the spans of a mapping's huge pages that this process owns almost entirely.

    Args:
        first: Address of the first huge page.
        pages: Entry of ``/proc/PID/pagemap`` for each small page from ``first``, for a whole
            number of huge pages.
    """
    small_each = PAGE_BYTES // mmap.PAGESIZE
    is_own = ((pages & _OWN) == _OWN).reshape(-1, small_each).mean(axis=1) >= _OWN_SHARE
    edges = np.flatnonzero(np.diff(is_own, prepend=False, append=False))
    for begin, end in edges.reshape(-1, 2).tolist():
        yield first + begin * PAGE_BYTES, first + end * PAGE_BYTES


def _pages(span: Span) -> npt.NDArray[np.uint64]:
    first, end = (address // mmap.PAGESIZE for address in span)
    with _PAGEMAP.open("rb", buffering=0) as pagemap:
        pagemap.seek(first * _ENTRY_BYTES)
        read = pagemap.read((end - first) * _ENTRY_BYTES)
    found = np.zeros(end - first, np.uint64)
    known = np.frombuffer(read, np.uint64)
    found[: len(known)] = known
    return found
