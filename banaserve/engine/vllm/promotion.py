"""A prefix that is on its way up from a tier below the pool, and how long to wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from banaserve.kvstore.interface import Lookup, Slot

PATIENCE = 4.0
"""Waits up to so many times the predicted time."""
SHORTEST_WAIT_S = 0.25
"""A prediction of a few milliseconds says little on a busy machine, the first ones nothing."""
LONGEST_WAIT_S = 10.0

Arrivals = Callable[[Sequence[Slot]], list[Lookup]]


class Outcome(Enum):
    """How a wait ended: all is there, a block failed, or time was up."""

    ARRIVED = "arrived"
    FAILED = "failed"
    LATE = "late"


@dataclass(slots=True)
class Promotion:
    """The leased slots of one request, some of which are not readable yet.

    Attributes:
        slots: In the order of the prefix; only the first ``num_ready`` are known to be readable.
        began_s: When the store was asked, on the engine's clock.
        predicted_s: The store's prediction of when the last is readable, from then on.
        compute_s: What computing the ones on their way would take; 0 if not known.
        outcome: None while it is worth waiting.
        num_pending: How many were on their way at first.
    """

    slots: Sequence[Slot]
    num_ready: int
    began_s: float
    predicted_s: float
    compute_s: float = 0.0
    outcome: Outcome | None = field(default=None, init=False)
    num_pending: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_pending = len(self.slots) - self.num_ready

    @property
    def num_arrived(self) -> int:
        """How many of those that were on their way have come."""
        return self.num_ready - (len(self.slots) - self.num_pending)

    @property
    def deadline_s(self) -> float:
        """Until when it is worth waiting.

        Who waits as long as computing takes, and then computes, has lost half of the time at most.
        """
        wait_s = max(SHORTEST_WAIT_S, PATIENCE * self.predicted_s, self.compute_s)
        return self.began_s + min(wait_s, LONGEST_WAIT_S)

    def look(self, arrivals: Arrivals, now_s: float) -> int | None:
        """How many slots from the first on can be read; None while it is worth waiting.

        A slot that failed ends the prefix, and what comes after it is not waited for.
        """
        if self.outcome is None:
            self._advance(arrivals(self.slots[self.num_ready :]), now_s)
        return None if self.outcome is None else self.num_ready

    def _advance(self, states: Sequence[Lookup], now_s: float) -> None:
        until = next((i for i, state in enumerate(states) if state is Lookup.MISS), len(states))
        ready = next((i for i, state in enumerate(states) if state is not Lookup.HIT), len(states))
        self.num_ready += ready
        if ready == until:
            self.outcome = Outcome.ARRIVED if until == len(states) else Outcome.FAILED
        elif now_s >= self.deadline_s:
            self.outcome = Outcome.LATE
