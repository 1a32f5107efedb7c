"""How fast a transport copies the pages of a KV cache: the bound for moving them."""

from __future__ import annotations

import secrets
import tempfile
import time

import numpy as np

from banaserve.transport.memory import Memory
from banaserve.transport.options import TransportOptions
from banaserve.transport.registry import create

_TIMEOUT_S = 60.0
_PAGES_A_TIME = 64
"""As many as a move copies of one layer in one submission."""


def write_bytes_per_s(name: str, page_bytes: int, total_bytes: int) -> float:
    """Copy ``total_bytes`` of whole pages to another region, whose memory is there already.

    Both ends are in this process; the bytes go the same way as between two.
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
            began_s = time.perf_counter()
            tickets = []
            for first in range(0, num_pages, _PAGES_A_TIME):
                part = offsets[first : first + _PAGES_A_TIME]
                tickets.append(region.submit_write(Memory.of(local), part, part, page_bytes, 1))
            for ticket in tickets:
                ticket.wait(_TIMEOUT_S)
            return num_pages * page_bytes / (time.perf_counter() - began_s)
        finally:
            here.close()
            there.close()
