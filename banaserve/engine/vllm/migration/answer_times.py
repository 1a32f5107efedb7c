"""How long a guest may take to answer a step, from what it took before."""

from __future__ import annotations

_FACTOR = 10.0
_SMOOTHING = 0.2


class AnswerTimes:
    """Learns seconds a token.

    Args:
        stall_s: How long a guest may be silent beyond what its work should take.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._seconds_per_token = 0.0

    def deadline_s(self, num_tokens: int) -> float:
        """For a step of so many tokens."""
        if not self._seconds_per_token:
            return _FACTOR * self._stall_s
        return self._stall_s + _FACTOR * self._seconds_per_token * num_tokens

    def learn(self, seconds: float, num_tokens: int) -> None:
        """A step took so long."""
        sample = seconds / max(1, num_tokens)
        if not self._seconds_per_token:
            self._seconds_per_token = sample
        self._seconds_per_token += _SMOOTHING * (sample - self._seconds_per_token)
