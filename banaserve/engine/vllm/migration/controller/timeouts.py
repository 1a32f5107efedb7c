"""Timeouts of a move's phases, which grow with its bytes. Pure."""

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
"""Seconds that any move may take, and bytes a second that the slowest supported machine does.

Building reads the checkpoint from a disk; copies go over 1 Gbit/s at worst and are repeated; a
commit copies what the last round has left.
"""


def timeout_s(stage: MoveStage, num_bytes: int) -> float:
    """Seconds after which a stage of a move of ``num_bytes`` is given up; at most an hour."""
    least_s, bytes_per_s = _ALLOWED[stage]
    return min(MAX_TIMEOUT_S, least_s + num_bytes / bytes_per_s)


def copies_again(dirty_before: int | None, dirty_now: int, num_times: int) -> bool:
    """Whether another PRECOPY is worth it: while each leaves less than half of the one before.

    Args:
        dirty_before: Blocks that the copy before has left; None before the second one.
        dirty_now: That this one has left.
        num_times: Copies so far.
    """
    if dirty_now == 0 or num_times >= 8:
        return False
    return dirty_before is None or 2 * dirty_now < dirty_before
