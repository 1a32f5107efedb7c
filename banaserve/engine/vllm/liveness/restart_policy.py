"""Pauses before an instance that has died is started again. Pure."""

from __future__ import annotations


class RestartPolicy:
    """How often and how soon a dead instance is started again.

    One that has served for a while did not fail to start, whatever it was that ended it.

    Args:
        limit: Restarts within ``window_s`` after which it is given up.
        first_s: Delay of the first restart; each further one waits twice as long.
        healthy_s: For so long it must serve to be as good as new.
    """

    def __init__(
        self,
        limit: int = 5,
        window_s: float = 300.0,
        first_s: float = 0.5,
        healthy_s: float = 10.0,
    ) -> None:
        self._healthy_s = healthy_s
        self._limit = limit
        self._window_s = window_s
        self._first_s = first_s
        self._at_s: list[float] = []

    def has_served(self, served_s: float) -> None:
        """It has ended after serving for so long."""
        if served_s >= self._healthy_s:
            self._at_s.clear()

    def next_delay_s(self, now_s: float) -> float | None:
        """Seconds to wait before the next restart; None when it is to be given up."""
        self._at_s = [at for at in self._at_s if now_s - at < self._window_s]
        if len(self._at_s) >= self._limit:
            return None
        self._at_s.append(now_s)
        return self._first_s * 2.0 ** (len(self._at_s) - 1)
