"""What one leg adds to the counts of its instance."""

from __future__ import annotations

from typing import Protocol


class Counting(Protocol):
    """What a flight needs of an ``Instance``."""

    def add_inflight(self, requests: int, prefill_tokens: int) -> None: ...


class Flight:
    """One leg's share in its instance's live counts."""

    def __init__(self, instance: Counting, prefill_tokens: int) -> None:
        self._instance = instance
        self._prefill_tokens = prefill_tokens
        instance.add_inflight(1, prefill_tokens)

    def prefilled(self) -> None:
        """The prompt has been computed. May be said again with each output."""
        if self._prefill_tokens:
            self._instance.add_inflight(0, -self._prefill_tokens)
            self._prefill_tokens = 0

    def end(self) -> None:
        self._instance.add_inflight(-1, 0)
