"""Outcomes of recent requests at each replica, and how long a first token usually takes.

A time to first token alone says little of a replica: a long prompt takes longer than a short one,
and longer still behind others. So it is divided by what all replicas usually take for as many
prompt tokens: the pace of the request, 1 if it is as fast as usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from banaserve_route.policies.interface import Flight
from banaserve_route.policies.line import Line

_ASSUMED_MS = 0.05
"""Time of a prompt token before any is measured, as in ``predicted_latency``."""

_LEAST_MS = 20.0
"""Times below this one count as equal: their ratio says nothing that a client would notice."""

_OUTLIER = 5.0
"""Ratio to the usual time at which a measured time is cut off before it is learnt."""


class AttemptOutcome(NamedTuple):
    """AttemptOutcome of one attempt at a replica, or what is known of it while it is under way.

    Attributes:
        at_s: Time of the end; the present while the attempt is under way.
        status: Status of the answer; 502 also if it broke off by the replica's fault, 0 if it was
            cancelled or is under way.
        ahead_tokens: Number of prompt tokens to compute before the first token: those of the
            request, and of the ones before it at the replica.
        waited_ms: Time to the first token without the round trip, or without one to ``at_s``; None
            if it says nothing of the replica's speed.
        has_token: True if the first token has come.
        is_streamed: True if the client asked for a stream. The first byte of any other answer comes
            with its last token.
    """

    at_s: float
    status: int
    ahead_tokens: int
    waited_ms: float | None
    has_token: bool
    is_streamed: bool


def outcome_of(flight: Flight, status: int, now_s: float) -> AttemptOutcome:
    """Return the outcome of ``flight``, which ended with ``status`` or is under way (0)."""
    request, first_s = flight.request, flight.first_token_s
    hit = flight.decision.hit_tokens if flight.cached_tokens is None else flight.cached_tokens
    waited_ms = None
    # A request without a prompt, such as one for the list of models, needs no engine.
    if status < 400 and request.num_tokens > 1:
        until_s = now_s if first_s is None else first_s
        waited_ms = max(0.0, 1e3 * (until_s - flight.sent_s) - flight.round_trip_ms)
    return AttemptOutcome(
        now_s,
        status,
        max(0, request.num_tokens - hit) + flight.backlog_tokens,
        waited_ms,
        first_s is not None,
        request.is_streamed,
    )


class FirstTokenTimes:
    """Usual times to first token over all replicas, of streams and of other answers."""

    def __init__(self) -> None:
        self._lines = {kind: Line(_ASSUMED_MS, 1000.0) for kind in (False, True)}

    def learn(self, outcomes: Iterable[AttemptOutcome]) -> None:
        """Learn from outcomes that have not been learnt from before."""
        for one in outcomes:
            if one.waited_ms is not None and one.has_token:
                line = self._lines[one.is_streamed]
                longest_ms = _OUTLIER * line(one.ahead_tokens) + 200
                line.learn(one.ahead_tokens, min(one.waited_ms, longest_ms))

    def usual_ms(self, ahead_tokens: int, is_streamed: bool) -> float:
        """Return the usual time to first token of a request."""
        return max(_LEAST_MS, self._lines[is_streamed](ahead_tokens))

    def pace(self, outcome: AttemptOutcome) -> float:
        """Return the time of ``outcome``, which has one, over the usual time.

        Without a first token the pace is a minimum.
        """
        assert outcome.waited_ms is not None
        usual_ms = self.usual_ms(outcome.ahead_tokens, outcome.is_streamed)
        return max(_LEAST_MS, outcome.waited_ms) / usual_ms
