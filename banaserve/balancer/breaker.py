"""A circuit breaker: a replica that fails again and again is left alone for a while."""

from __future__ import annotations


class Breaker:
    """Closed lets everything through, open nothing, half open one request on trial.

    Attributes:
        is_open: Nothing may be sent before ``retry_at_s``.
    """

    __slots__ = (
        "_failures",
        "_limit",
        "_longest_pause_s",
        "_pause_s",
        "_shortest_pause_s",
        "_trial",
        "is_open",
        "num_opened",
        "retry_at_s",
    )  # fmt: skip

    def __init__(self, failures: int, pause_s: float, longest_pause_s: float) -> None:
        self._failures = 0
        self._trial = self.is_open = False
        self.take_settings(failures, pause_s, longest_pause_s)
        self.num_opened = 0
        self.retry_at_s = 0.0

    def take_settings(self, failures: int, pause_s: float, longest_pause_s: float) -> None:
        """Let these hold; a circuit that is open stays so until its time."""
        self._limit = failures
        self._shortest_pause_s, self._longest_pause_s = pause_s, longest_pause_s
        if not self.is_open:
            self._pause_s = pause_s

    def allows(self, now_s: float) -> bool:
        """Returns whether a request may be sent; after the pause one at a time."""
        return not self.is_open or (now_s >= self.retry_at_s and not self._trial)

    def sent(self) -> None:
        """A request is on its way."""
        self._trial = self.is_open

    def succeeded(self) -> None:
        """A request was answered."""
        self._failures = 0
        if self.is_open:
            self.is_open = self._trial = False
            self._pause_s = self._shortest_pause_s

    def failed(self, now_s: float) -> None:
        """A request failed through no fault of its own."""
        self._failures += 1
        if self.is_open and not self._trial:
            return
        if not self.is_open and self._failures < self._limit:
            return
        if self.is_open:
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        self.is_open, self._trial = True, False
        self.num_opened += 1
        self.retry_at_s = now_s + self._pause_s

    def given_up(self) -> None:
        """A request ended without saying anything of the replica: cancelled, say."""
        self._trial = False
