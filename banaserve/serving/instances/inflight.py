"""Legs of requests that an instance holds, and their counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Inflight(NamedTuple):
    """Counts of the legs in flight at an instance: sent and not ended. See ``InstanceView``."""

    requests: int = 0
    tokens: int = 0
    prefill_requests: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0

    def with_leg(self, leg: Inflight, sign: int) -> Inflight:
        """Return these counts with ``leg`` added (``sign`` 1) or subtracted (``sign`` -1)."""
        return Inflight(*(own + sign * its for own, its in zip(self, leg, strict=True)))


@dataclass(eq=False)
class InflightLeg:
    """One leg of a request at its instance, counted until it ends.

    Attributes:
        add: Function that adds to the instance's counts, or subtracts from them with sign -1.
        prefill_tokens: Number of the leg's ``tokens`` that the instance has to compute.
        tokens: Number of tokens that the leg has when it is sent.
        on_move: Function that moves the leg elsewhere; its argument is a reason of
            ``LegMovedError``. None if the leg cannot move.
        starts_over: True if the leg would restart elsewhere from nothing; it moves only when its
            engine is replaced.
        moved_s: Time of the leg's last move by the rebalancer, on the event loop's clock, in
            seconds; None if it was not moved.
        has_output: True if the engine has computed a token of the leg.
    """

    add: Callable[[Inflight, int], None]
    prefill_tokens: int
    tokens: int
    on_move: Callable[[str], None] | None = None
    starts_over: bool = False
    moved_s: float | None = None
    has_output: bool = False

    def __post_init__(self) -> None:
        computed, self._leg = self.prefill_tokens, Inflight(1, self.tokens)
        pairs = computed * (2 * self.tokens - computed)
        self._prompt = Inflight(0, 0, 1, computed, pairs) if computed else None
        self.add(self._leg, 1)
        if self._prompt is not None:
            self.add(self._prompt, 1)

    @property
    def continues(self) -> bool:
        """True if the leg is a stream that can continue elsewhere."""
        return self.on_move is not None and not self.starts_over

    @property
    def is_prompt(self) -> bool:
        """True if more than half of the leg's tokens are still to be computed here."""
        return self._prompt is not None and 2 * self._prompt.prefill_tokens > self.tokens

    def move(self, reason: str) -> None:
        """Move the leg elsewhere, if it can move."""
        if self.on_move is not None:
            self.on_move(reason)

    def prefilled(self) -> None:
        """Note that the prompt has been computed; idempotent, called with each output."""
        self.has_output = True
        if self._prompt is not None:
            self.add(self._prompt, -1)
            self._prompt = None

    def end(self) -> None:
        """Count the leg no more."""
        self.prefilled()
        self.add(self._leg, -1)
