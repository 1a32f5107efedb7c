"""Delays before the restarts of an instance that has died. Pure."""

from __future__ import annotations


class RestartPolicy:
    """Limit and delays of the restarts of an instance that dies.

    An instance that has served for a while did not fail at its start, whatever ended it, so its
    earlier restarts are forgotten.

    Args:
        limit: Number of restarts within ``window_s`` after which the instance is given up.
        window_s: Time over which restarts are counted, in seconds.
        first_s: Delay of the first restart, in seconds; each further delay is twice as long.
        healthy_s: Serving time after which earlier restarts are forgotten, in seconds.
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
        """Record that the instance has ended after serving for ``served_s`` seconds."""
        if served_s >= self._healthy_s:
            self._at_s.clear()

    def next_delay_s(self, now_s: float) -> float | None:
        """Return the delay of the next restart, in seconds; None to give the instance up.

        The restart is counted.
        """
        self._at_s = [at for at in self._at_s if now_s - at < self._window_s]
        if len(self._at_s) >= self._limit:
            return None
        self._at_s.append(now_s)
        return self._first_s * 2.0 ** (len(self._at_s) - 1)
