"""How fast a transport copies the pages of a KV cache: the bound for moving them."""

from __future__ import annotations

import secrets
import tempfile
import time

import numpy as np

from banaserve.bench.statistics import median
from banaserve.transport.interface import Offsets, RemoteRegion
from banaserve.transport.memory import Memory
from banaserve.transport.options import TransportOptions
from banaserve.transport.registry import create

_TIMEOUT_S = 60.0
_PAGES_A_TIME = 320
"""Of a KV cache, about as many as a move copies in one submission."""
_REPEATS = 5


def write_bytes_per_s(name: str, page_bytes: int, total_bytes: int) -> float:
    """Copy ``total_bytes`` of whole pages to another region, whose memory is there already.

    Both ends are in this process; the bytes go the same way as between two. The median of
    ``_REPEATS``: one alone says more of what else the machine does than of the transport.
    """
    num_pages = max(1, total_bytes // page_bytes)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        options = TransportOptions(folder=folder, secret=secrets.token_bytes(32))
        here, there = create(name, options), create(name, options)
        try:
            offered = there.offer(num_pages * page_bytes, 1)
            region = here.open(offered.descriptor, _TIMEOUT_S)
            region.warm(0, num_pages * page_bytes)
            local = np.ones(num_pages * page_bytes, np.uint8)
            offsets = np.arange(num_pages, dtype=np.int64) * page_bytes
            taken_s = [
                _copy_s(region, Memory.of(local), offsets, page_bytes) for _ in range(_REPEATS)
            ]
            return num_pages * page_bytes / median(taken_s)
        finally:
            here.close()
            there.close()


def _copy_s(region: RemoteRegion, local: Memory, offsets: Offsets, page_bytes: int) -> float:
    began_s = time.perf_counter()
    parts = [
        offsets[first : first + _PAGES_A_TIME] for first in range(0, len(offsets), _PAGES_A_TIME)
    ]
    tickets = [region.submit_write(local, part, part, page_bytes, 1) for part in parts]
    for ticket in tickets:
        ticket.wait(_TIMEOUT_S)
    return time.perf_counter() - began_s
