"""Log of refusals: at most one line a second for each cause, whatever clients do."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

_INTERVAL_S = 1.0
_MAX_CHARS = 300


def printable(text: str) -> str:
    """``text`` as one line: what clients name must not look like other lines, or move a cursor."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


class RefusalLog:
    """Passes the first line of a cause on, and after a second the next with a count of the rest.

    Args:
        log: Gets the lines.
        clock: Seconds, monotonic.
    """

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        self._log, self._clock = log, clock
        self._next_s: dict[str, float] = {}
        self._num_held: dict[str, int] = {}

    def say(self, cause: str, line: str) -> None:
        """Log ``line``, or count it.

        Args:
            cause: One of a fixed number of words.
        """
        now_s = self._clock()
        if now_s < self._next_s.get(cause, 0.0):
            self._num_held[cause] = self._num_held.get(cause, 0) + 1
            return
        self._next_s[cause] = now_s + _INTERVAL_S
        held = self._num_held.pop(cause, 0)
        line = printable(line[:_MAX_CHARS])
        self._log(f"{line} ({held} more since the last line)" if held else line)
