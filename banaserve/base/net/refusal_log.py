"""Log of refusals: at most one line per second for each cause, whatever clients do."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from banaserve.base.text.printable import printable

_INTERVAL_S = 1.0
_MAX_CHARS = 300


class RefusalLog:
    """Log with a rate limit: of each cause a line per second, with the count of lines left out.

    Args:
        log: Writes a line.
        clock: Returns monotonic seconds.
    """

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        self._log, self._clock = log, clock
        self._next_s: dict[str, float] = {}
        self._num_held: dict[str, int] = {}

    def say(self, cause: str, line: str) -> None:
        """Log ``line``, or count it.

        Args:
            cause: Cause of the refusal, from a fixed set of words.
        """
        now_s = self._clock()
        if now_s < self._next_s.get(cause, 0.0):
            self._num_held[cause] = self._num_held.get(cause, 0) + 1
            return
        self._next_s[cause] = now_s + _INTERVAL_S
        held = self._num_held.pop(cause, 0)
        line = printable(line[:_MAX_CHARS])
        self._log(f"{line} ({held} more since the last line)" if held else line)
