"""Hedging: which requests are sent to a second replica, when, and how many of them.

A request whose first token is late is sent to a second replica too, and the answer that begins
first is used (Dean and Barroso, "The Tail at Scale", 2013).
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from banaserve_route.balancer.config import HedgeSettings
from banaserve_route.balancer.http.request import ClientRequest
from banaserve_route.balancer.targets.outcomes import FirstTokenTimes, ahead_tokens
from banaserve_route.policies.interface import Flight

HEDGED_PATHS = frozenset((b"/v1/completions", b"/v1/chat/completions", b"/v1/messages"))
"""Paths of requests that leave nothing behind at a replica, unlike ``/v1/responses``: a response is
stored, or goes on although its connection is closed, if the client asks for that."""

_SAVED_REQUESTS = 100
"""Number of requests for which the budget that they leave unused is kept."""


class HedgeEvent(StrEnum):
    """Event of a late request, as a metric's label: sent to a second replica, or why not."""

    SENT = "sent"
    WON = "won"
    """The second attempt was used: it began to answer first, or the first one failed."""
    OVER_BUDGET = "over_budget"
    OVERLOADED = "overloaded"
    NO_REPLICA = "no_replica"


class Hedger:
    """Time limits and budget of hedged requests.

    Attributes:
        counts: Number of late requests by ``HedgeEvent``.
    """

    def __init__(self, times: FirstTokenTimes) -> None:
        self.counts: Counter[str] = Counter()
        self._times = times
        self._budget = 0.0
        self.take_settings(HedgeSettings())

    def take_settings(self, settings: HedgeSettings) -> None:
        """Apply ``settings`` from now on."""
        self._after_ms, self._quantile = settings.after_ms, settings.quantile
        self._fraction = settings.max_fraction

    def delay_s(self, message: ClientRequest, flight: Flight) -> float | None:
        """Return the time after which the first token of a request is late; None for never.

        Each request that may be hedged adds to the budget.
        """
        if message.path not in HEDGED_PATHS or message.method != b"POST":
            return None
        most = max(1.0, _SAVED_REQUESTS * self._fraction)
        self._budget = min(self._budget + self._fraction, most)
        delay_ms = self._after_ms
        if self._quantile is not None:
            tokens, is_streamed = ahead_tokens(flight), flight.request.is_streamed
            delay_ms = self._times.quantile_ms(self._quantile, tokens, is_streamed)
        return None if delay_ms is None else delay_ms / 1e3

    def spend(self) -> bool:
        """Take one request from the budget; return whether there was one."""
        # A sum of fractions may be a little less than the whole number that it should be.
        has_one = self._budget >= 1 - 1e-9
        self._budget -= has_one
        return has_one
