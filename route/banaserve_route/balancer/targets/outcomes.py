"""Outcomes of recent requests at each replica, and how long a first token usually takes.

A time to first token alone says little of a replica: a long prompt takes longer than a short one,
and longer still behind others. So it is divided by what all replicas usually take for as many
prompt tokens: the pace of the request, 1 if it is as fast as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from banaserve._native import Line
from banaserve_route.policies.interface import Flight

_ASSUMED_MS = 0.05
"""Time of a prompt token before any is measured, as in ``predicted_latency``."""

_LEAST_MS = 20.0
"""Times below this one count as equal: their ratio says nothing that a client would notice."""

_OUTLIER = 5.0
"""Ratio to the usual time at which a measured time is cut off before it is learnt."""

_MAX_LEARNT = 512
"""Maximum number of outcomes to learn from at once: more would hold up the event loop."""

_FEWEST = 20
"""Number of recent times from which on a quantile of them is known."""


class AttemptOutcome(NamedTuple):
    """Outcome of one attempt at a replica, or what is known of it while it is under way.

    Attributes:
        at_s: Time of the end; the present while the attempt is under way.
        status: Status of the answer; 502 also if it broke off by the replica's fault, 0 if it was
            cancelled or is under way.
        ahead_tokens: Number of prompt tokens to compute before the first token: those of the
            request, and of the ones before it at the replica.
        waited_ms: Time to the first token without the round trip, or without one to ``at_s``; None
            if it says nothing of the replica's speed.
        has_token: True if the first token has come.
        hit_fraction: Share of the prompt that was in the replica's cache, as it reports or as the
            policy expected.
        is_streamed: True if the client asked for a stream. The first byte of any other answer comes
            with its last token.
    """

    at_s: float
    status: int
    ahead_tokens: int
    waited_ms: float | None
    has_token: bool
    hit_fraction: float
    is_streamed: bool


def ahead_tokens(flight: Flight) -> int:
    """Return the number of prompt tokens to compute before the first token of ``flight``."""
    return max(0, flight.request.num_tokens - _hit_tokens(flight)) + flight.backlog_tokens


def _hit_tokens(flight: Flight) -> int:
    return flight.decision.hit_tokens if flight.cached_tokens is None else flight.cached_tokens


def outcome_of(flight: Flight, status: int, now_s: float) -> AttemptOutcome:
    """Return the outcome of ``flight``, which ended with ``status`` or is under way (0)."""
    request, first_s = flight.request, flight.first_token_s
    waited_ms = None
    # A request without a prompt, such as one for the list of models, needs no engine.
    if status < 400 and request.num_tokens > 1:
        until_s = now_s if first_s is None else first_s
        waited_ms = max(0.0, 1e3 * (until_s - flight.sent_s) - flight.round_trip_ms)
    return AttemptOutcome(
        now_s,
        status,
        ahead_tokens(flight),
        waited_ms,
        first_s is not None,
        min(1.0, _hit_tokens(flight) / request.num_tokens),
        request.is_streamed,
    )


class FirstTokenTimes:
    """Usual times to first token over all replicas, of streams and of other answers."""

    def __init__(self) -> None:
        self._lines = {kind: Line(_ASSUMED_MS, 1000.0) for kind in (False, True)}
        self._paces: dict[bool, list[float]] = {False: [], True: []}

    def learn(self, recent: Sequence[AttemptOutcome], since_s: float) -> None:
        """Learn from recent outcomes; those after ``since_s`` have not been learnt from before."""
        timed = [one for one in recent if one.waited_ms is not None]
        new = [one for one in timed if one.has_token and one.at_s > since_s]
        for one in sorted(new, key=lambda one: one.at_s)[-_MAX_LEARNT:]:
            line, waited_ms = self._lines[one.is_streamed], one.waited_ms or 0.0
            longest_ms = _OUTLIER * line(one.ahead_tokens) + 200
            line.learn(one.ahead_tokens, min(waited_ms, longest_ms))
        for kind in self._paces:
            self._paces[kind] = self._sorted_paces(
                [one for one in timed if one.is_streamed == kind]
            )

    def _sorted_paces(self, timed: Sequence[AttemptOutcome]) -> list[float]:
        paces = [self.pace(one) for one in timed if one.has_token]
        if not paces:
            return []
        # A first token that has not come tells how long it takes at least if it is late. Without
        # these, the quantile would fall with each hedged request, whose slow attempt is cancelled.
        usual = median(paces)
        waits = [self.pace(one) for one in timed if not one.has_token]
        return sorted([*paces, *(one for one in waits if one > usual)])

    def usual_ms(self, ahead_tokens: int, is_streamed: bool) -> float:
        """Return the usual time to first token of a request."""
        return max(_LEAST_MS, self._lines[is_streamed](ahead_tokens))

    def quantile_ms(self, quantile: float, ahead_tokens: int, is_streamed: bool) -> float | None:
        """Return the time that this share of first tokens takes at most; None if few are known."""
        paces = self._paces[is_streamed]
        if len(paces) < _FEWEST:
            return None
        return paces[int(quantile * len(paces))] * self.usual_ms(ahead_tokens, is_streamed)

    def pace(self, outcome: AttemptOutcome) -> float:
        """Return the time of ``outcome``, which has one, over the usual time.

        Without a first token the pace is a minimum.
        """
        assert outcome.waited_ms is not None
        usual_ms = self.usual_ms(outcome.ahead_tokens, outcome.is_streamed)
        return max(_LEAST_MS, outcome.waited_ms) / usual_ms
