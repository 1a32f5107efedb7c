"""Timeouts of a move's stages, which grow with its bytes: pure functions."""

from __future__ import annotations

from enum import Enum

MAX_TIMEOUT_S = 3600.0


class MoveStage(Enum):
    """A stage of a move as the coordinator sees it."""

    SHRINK = "shrink"
    START = "start"
    PREPARE = "prepare"
    COPY = "copy"
    COMMIT = "commit"
    FREE = "free"


_ALLOWED = {
    MoveStage.SHRINK: (60.0, 1e9),
    MoveStage.START: (120.0, 1e9),
    MoveStage.PREPARE: (60.0, 20e6),
    MoveStage.COPY: (30.0, 25e6),
    MoveStage.COMMIT: (10.0, 100e6),
    MoveStage.FREE: (10.0, 1e9),
}
"""Base time of each stage in seconds, and bytes per second on the slowest supported machine.

Building reads the checkpoint from a disk; copies go over 1 Gbit/s at worst and are repeated; a
commit copies the blocks that the last round has left.
"""


def timeout_s(stage: MoveStage, num_bytes: int) -> float:
    """Return the timeout of a stage of a move of ``num_bytes``, in seconds; at most an hour."""
    least_s, bytes_per_s = _ALLOWED[stage]
    return min(MAX_TIMEOUT_S, least_s + num_bytes / bytes_per_s)


def copies_again(dirty_before: int | None, dirty_now: int, num_times: int) -> bool:
    """Return whether to PRECOPY again: while each copy leaves less than half as many blocks.

    Args:
        dirty_before: Blocks that the previous copy left; None after the first copy.
        dirty_now: Blocks that the last copy left.
        num_times: Number of copies so far.
    """
    if dirty_now == 0 or num_times >= 8:
        return False
    return dirty_before is None or 2 * dirty_now < dirty_before
