"""Limits of an SSD tier, and the division of its budget into segments."""

from __future__ import annotations

from banaserve.errors import UserError
from banaserve.kvstore.sizes import format_size
from banaserve.kvstore.tiers.ssd.record import PAGE_BYTES

MIN_CAPACITY_BYTES = 64 * PAGE_BYTES
# Transfers for copies, on top of those for loads and stores.
MAX_COPIES = 4
# A process that was killed has left at most this many records unfinished.
MAX_UNFINISHED = 256
MAX_QUEUE_DEPTH = MAX_UNFINISHED - MAX_COPIES
_MIN_SEGMENT_BYTES = 64 * 2**20
_MAX_SEGMENTS = 64
_MIN_SEGMENTS = 8


def check_limits(capacity_bytes: int, queue_depth: int) -> None:
    """Raise unless a tier can be run like this.

    Raises:
        UserError: It cannot; says what would be possible.
    """
    if capacity_bytes < MIN_CAPACITY_BYTES:
        least, given = format_size(MIN_CAPACITY_BYTES), format_size(max(0, capacity_bytes))
        raise UserError(f"the SSD tier needs at least {least}, not {given}")
    if not 1 <= queue_depth <= MAX_QUEUE_DEPTH:
        raise UserError(f"a queue depth of {queue_depth} is not within 1 to {MAX_QUEUE_DEPTH}")


def default_segment_bytes(capacity_bytes: int) -> int:
    """A 64th of the budget, more where that is little, at most an eighth."""
    wanted = max(capacity_bytes // _MAX_SEGMENTS, _MIN_SEGMENT_BYTES)
    return min(wanted, capacity_bytes // _MIN_SEGMENTS) // PAGE_BYTES * PAGE_BYTES
