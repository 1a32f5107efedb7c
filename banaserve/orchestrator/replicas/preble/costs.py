"""Parts of Preble's three costs: regressions, windows of time, averages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Prefill = Callable[[float, float], float]
"""Milliseconds to compute some tokens after a context of others."""


def mistral_7b_a6000(tokens: float, context: float) -> float:
    """Preble's code for Mistral-7B on an A6000; falls with more tokens from 244 to 383."""
    if tokens < 192:
        linear = 22.0
    elif tokens < 384:
        linear = -118 + 1.25 * tokens - 0.00256 * tokens**2
    else:
        linear = 0.10842571 * tokens + 4.2098
    return (linear + _attention(tokens, context)) / 0.9


def mistral_7b_a6000_monotone(tokens: float, context: float) -> float:
    """The same without the dip, which goes down to -14.8 ms at 383 tokens."""
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
    """A sum over the last ``window_s`` seconds, in two halves: it forgets half at a time."""

    window_s: float
    recent: float = 0.0
    before: float = 0.0
    _half: int = 0

    def add(self, value: float, now_s: float) -> None:
        """Adds ``value`` at ``now_s``."""
        self.roll(now_s)
        self.recent += value

    def total(self, now_s: float) -> float:
        """Returns the sum at ``now_s``."""
        self.roll(now_s)
        return self.recent + self.before

    def roll(self, now_s: float) -> None:
        """Moves on to the half in which ``now_s`` lies."""
        half = int(now_s / (self.window_s / 2))
        if half > self._half:
            self.before = self.recent if half == self._half + 1 else 0.0
            self.recent = 0.0
            self._half = half


@dataclass(slots=True)
class WorkWindow:
    """Milliseconds of work that one replica was sent within ``window_s``, to the moment."""

    window_s: float
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    _sent: deque[tuple[float, float, float]] = field(default_factory=deque)

    @property
    def num_sent(self) -> int:
        """Requests within the window."""
        return len(self._sent)

    def add(self, now_s: float, prefill_ms: float, decode_ms: float) -> None:
        """Counts a request sent at ``now_s``."""
        self._sent.append((now_s, prefill_ms, decode_ms))
        self.prefill_ms += prefill_ms
        self.decode_ms += decode_ms

    def forget(self, now_s: float) -> None:
        """Drops what was sent before the window that ends at ``now_s``."""
        while self._sent and self._sent[0][0] < now_s - self.window_s:
            _, prefill_ms, decode_ms = self._sent.popleft()
            self.prefill_ms -= prefill_ms
            self.decode_ms -= decode_ms
        if not self._sent:
            self.prefill_ms = self.decode_ms = 0.0


class WindowLoad:
    """Load that one replica was sent.

    Attributes:
        outstanding_ms: Work of the requests that have not ended.
        output_tokens: Of its answers, on average; 0 before the first.
    """

    def __init__(self, window_s: float, recent_s: float) -> None:
        self.outstanding_ms = 0.0
        self.output_tokens = 0.0
        self._history = WorkWindow(window_s)
        self._recent = WorkWindow(recent_s)

    def add(self, now_s: float, prefill_ms: float, decode_ms: float) -> None:
        """Counts a request sent at ``now_s``."""
        self._history.add(now_s, prefill_ms, decode_ms)
        self._recent.add(now_s, prefill_ms, decode_ms)
        self.outstanding_ms += prefill_ms + decode_ms

    def history_ms(self, now_s: float) -> float:
        """Returns the work sent within the window."""
        self.forget(now_s)
        return self._history.prefill_ms + self._history.decode_ms

    def num_sent(self, now_s: float) -> int:
        """Returns the requests sent within the window."""
        self.forget(now_s)
        return self._history.num_sent

    def decode_fraction(self, now_s: float) -> float:
        """Returns the share of decoding in the work sent of late."""
        self.forget(now_s)
        total = self._recent.prefill_ms + self._recent.decode_ms
        return self._recent.decode_ms / total if total else 0.0

    def forget(self, now_s: float) -> None:
        """Drops what has left the windows."""
        self._history.forget(now_s)
        self._recent.forget(now_s)
