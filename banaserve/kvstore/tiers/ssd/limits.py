"""Limits of an SSD tier, and the division of its budget into segments."""

from __future__ import annotations

from banaserve.base.errors import UserError
from banaserve.kvstore.sizes import format_size
from banaserve.kvstore.tiers.ssd.record import PAGE_BYTES

MIN_CAPACITY_BYTES = 64 * PAGE_BYTES
# Transfers for copies, on top of those for loads and stores.
MAX_COPIES = 4
# A process that is killed leaves at most this many records unfinished.
MAX_UNFINISHED = 256
MAX_QUEUE_DEPTH = MAX_UNFINISHED - MAX_COPIES
_MIN_SEGMENT_BYTES = 64 * 2**20
_MAX_SEGMENTS = 64
_MIN_SEGMENTS = 8


def check_limits(capacity_bytes: int, queue_depth: int) -> None:
    """Check the budget and the queue depth of a tier.

    Raises:
        UserError: One of them is out of range; the message gives the possible values.
    """
    if capacity_bytes < MIN_CAPACITY_BYTES:
        least, given = format_size(MIN_CAPACITY_BYTES), format_size(max(0, capacity_bytes))
        raise UserError(f"the SSD tier needs at least {least}, not {given}")
    if not 1 <= queue_depth <= MAX_QUEUE_DEPTH:
        raise UserError(f"a queue depth of {queue_depth} is not within 1 to {MAX_QUEUE_DEPTH}")


def default_segment_bytes(capacity_bytes: int) -> int:
    """Return a 64th of the budget, but at least 64 MiB, and at most an eighth of the budget."""
    wanted = max(capacity_bytes // _MAX_SEGMENTS, _MIN_SEGMENT_BYTES)
    return min(wanted, capacity_bytes // _MIN_SEGMENTS) // PAGE_BYTES * PAGE_BYTES
