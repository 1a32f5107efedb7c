"""Parts of Preble's three costs: regressions, time windows, averages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Prefill = Callable[[float, float], float]
"""Function that returns the milliseconds to compute some tokens after a context of others."""


def mistral_7b_a6000(tokens: float, context: float) -> float:
    """Return the time of Preble's code for Mistral-7B on an A6000, in milliseconds.

    From 244 to 383 tokens, the time falls with more tokens.
    """
    if tokens < 192:
        linear = 22.0
    elif tokens < 384:
        linear = -118 + 1.25 * tokens - 0.00256 * tokens**2
    else:
        linear = 0.10842571 * tokens + 4.2098
    return (linear + _attention(tokens, context)) / 0.9


def mistral_7b_a6000_monotone(tokens: float, context: float) -> float:
    """Return the time of ``mistral_7b_a6000`` without its dip, which is -14.8 ms at 383 tokens."""
    linear = max(22.0, 0.10842571 * tokens + 4.2098)
    return (linear + _attention(tokens, context)) / 0.9


def _attention(tokens: float, context: float) -> float:
    attention = 0.32 if context <= 1024 else 1.86e-4 * context + 0.159
    if tokens * context > 1 << 20:
        attention += 1.13e-3 * tokens + 1.75e-3 * context + 2.19e-6 * tokens * context
    return attention


REGRESSIONS: Mapping[str, Prefill] = {
    "as-coded": mistral_7b_a6000,
    "monotone": mistral_7b_a6000_monotone,
}


@dataclass(slots=True)
class WindowSum:
    """Sum over the last ``window_s`` seconds, in two halves; a whole half expires at a time."""

    window_s: float
    recent: float = 0.0
    before: float = 0.0
    _half: int = 0

    def add(self, value: float, now_s: float) -> None:
        """Add ``value`` at ``now_s``."""
        self.roll(now_s)
        self.recent += value

    def total(self, now_s: float) -> float:
        """Return the sum at ``now_s``."""
        self.roll(now_s)
        return self.recent + self.before

    def roll(self, now_s: float) -> None:
        """Advance to the half that contains ``now_s``."""
        half = int(now_s / (self.window_s / 2))
        if half > self._half:
            self.before = self.recent if half == self._half + 1 else 0.0
            self.recent = 0.0
            self._half = half


@dataclass(slots=True)
class TimedSum:
    """Sum and number of the values within exactly the last ``window_s`` seconds."""

    window_s: float
    total: float = 0.0
    _added: deque[tuple[float, float]] = field(default_factory=deque)

    @property
    def num_added(self) -> int:
        """Number of values within the window."""
        return len(self._added)

    def add(self, value: float, now_s: float) -> None:
        """Add ``value`` at ``now_s``."""
        self._added.append((now_s, value))
        self.total += value

    def forget(self, now_s: float) -> None:
        """Drop values from before the window that ends at ``now_s``."""
        while self._added and self._added[0][0] < now_s - self.window_s:
            self.total -= self._added.popleft()[1]
        if not self._added:
            self.total = 0.0


class WindowLoad:
    """Load sent to one replica.

    Attributes:
        outstanding_ms: Work of the requests that have not ended, in milliseconds.
        output_tokens: Mean number of output tokens of its answers; 0 before the first answer.
    """

    def __init__(self, window_s: float, recent_s: float) -> None:
        self.outstanding_ms = 0.0
        self.output_tokens = 0.0
        self._work_ms = TimedSum(window_s)
        self._prompt_tokens, self._hit_tokens = TimedSum(recent_s), TimedSum(recent_s)

    def add(self, now_s: float, work_ms: float, prompt_tokens: int, hit_tokens: int) -> None:
        """Count a request sent at ``now_s``."""
        self._work_ms.add(work_ms, now_s)
        self._prompt_tokens.add(prompt_tokens, now_s)
        self._hit_tokens.add(hit_tokens, now_s)
        self.outstanding_ms += work_ms

    def history_ms(self, now_s: float) -> float:
        """Return the work sent within the window, in milliseconds."""
        self.forget(now_s)
        return self._work_ms.total

    def num_sent(self, now_s: float) -> int:
        """Return the number of requests sent within the window."""
        self.forget(now_s)
        return self._work_ms.num_added

    def decode_fraction(self, now_s: float) -> float:
        """Return the cached share of the prompt tokens sent within the last ``recent_s`` seconds.

        A cached prompt leaves only decoding to do, so the paper counts it as such.
        """
        self.forget(now_s)
        return self._hit_tokens.total / max(1.0, self._prompt_tokens.total)

    def forget(self, now_s: float) -> None:
        """Drop requests that are older than the windows."""
        for one in (self._work_ms, self._prompt_tokens, self._hit_tokens):
            one.forget(now_s)
