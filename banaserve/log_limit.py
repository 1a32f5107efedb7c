"""Limit of log lines that clients can cause: one a second for each cause."""

from __future__ import annotations

_QUIET_S = 1.0
_MAX_CHARS = 200


class LogLimit:
    """Chooses which lines are written; callers say the time."""

    def __init__(self) -> None:
        self._written_at_s: dict[str, float] = {}
        self._num_left_out: dict[str, int] = {}

    def line(self, cause: str, words: str, now_s: float) -> str | None:
        """Returns what is to be written, with how many were left out before; None for nothing.

        Args:
            cause: One of a few words.
        """
        before_s = self._written_at_s.get(cause)
        if before_s is not None and now_s - before_s < _QUIET_S:
            self._num_left_out[cause] = self._num_left_out.get(cause, 0) + 1
            return None
        self._written_at_s[cause] = now_s
        left_out = self._num_left_out.pop(cause, 0)
        more = f" ({left_out} more since the last line)" if left_out else ""
        return words[:_MAX_CHARS] + more
