"""Status of a balancer at one moment, as its page shows it; computed only when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic, time

import msgspec

from banaserve_route.balancer.metrics import Metrics
from banaserve_route.balancer.targets.outcomes import AttemptOutcome
from banaserve_route.balancer.targets.target import Target
from banaserve_route.policies.caches.known_caches import KnownCaches

_WINDOW_S = 30.0
"""Time in which first tokens count for the figures of the balancer."""


class TargetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A replica or a peer.

    Attributes:
        state: ``ready``, ``full``, ``starting``, ``ejected``, ``circuit open`` or ``down``.
        ejected_s: Time until an ejected replica comes back, in seconds; 0 for others.
        num_prefilling: Number of outstanding requests without a first token.
        num_answers: Number of all answers.
        num_failures: Number of all answers with a status of 500 or more, and of those broken off.
        ejections: Number of all ejections by reason.
        first_token_s: Median of recent times to first token of streams, or to first byte of all
            answers if no stream is known; None without any.
        hit_fraction: Share of recent prompts that was in the replica's cache, as it reports or as
            the policy expected; None without any.
        cache: State of what the replica's KV events tell; empty without events.
    """

    id: str
    url: str
    region: str
    state: str
    ejected_s: float
    num_outstanding: int
    num_prefilling: int
    num_pending: int
    num_running: int
    round_trip_ms: float
    num_answers: int
    num_failures: int
    ejections: dict[str, int]
    first_token_s: float | None
    hit_fraction: float | None
    cache: str


class BalancerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that the page plots; times to first token are as in ``TargetStatus``."""

    num_under_way: int
    num_waiting: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None


class BalancerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All that the page shows.

    Attributes:
        at_s: Time of the day, in seconds since 1970.
        num_answers: Number of all answers to clients; ``num_failures`` of them are errors of
            servers.
        hedges: Number of late requests by event; empty if none have been hedged.
    """

    at_s: float
    region: str
    policy: str
    num_answers: int
    num_failures: int
    hedges: dict[str, int]
    figures: BalancerFigures
    targets: list[TargetStatus]


def target_status(target: Target, caches: KnownCaches, now_s: float) -> TargetStatus:
    """Return the status of one target."""
    view, ejection = target.view, target.ejection
    recent = _answered([target])
    hits = [one.hit_fraction for one in recent]
    return TargetStatus(
        id=view.id,
        url=target.endpoint.url,
        region=view.region,
        state=_state(target),
        ejected_s=max(0.0, ejection.until_s - now_s) if ejection.is_active else 0.0,
        num_outstanding=view.outstanding,
        num_prefilling=view.prefilling,
        num_pending=view.pending,
        num_running=view.running,
        round_trip_ms=view.round_trip_ms,
        num_answers=target.num_answers.total(),
        num_failures=target.num_broken
        + sum(count for status, count in target.num_answers.items() if status >= 500),
        ejections={str(reason): count for reason, count in ejection.counts.items()},
        first_token_s=_first_token_s(recent, 0.5),
        hit_fraction=sum(hits) / len(hits) if hits else None,
        cache=caches.state(view.id) or "",
    )


def encode_status(region: str, policy: str, metrics: Metrics) -> bytes:
    """Return the JSON of the status of the balancer that ``metrics`` counts for."""
    now_s, targets = monotonic(), list(metrics.targets())
    num_answers, num_failures = metrics.num_answers
    return msgspec.json.encode(
        BalancerStatus(
            at_s=time(),
            region=region,
            policy=policy,
            num_answers=num_answers,
            num_failures=num_failures,
            hedges=dict(metrics.hedges),
            figures=_figures(targets, metrics, now_s),
            targets=[target_status(one, metrics.caches, now_s) for one in targets],
        )
    )


def _figures(targets: Sequence[Target], metrics: Metrics, now_s: float) -> BalancerFigures:
    recent = [one for one in _answered(targets) if one.at_s >= now_s - _WINDOW_S]
    return BalancerFigures(
        num_under_way=metrics.num_under_way(),
        num_waiting=metrics.queue_length(),
        ttft_p50_s=_first_token_s(recent, 0.5),
        ttft_p99_s=_first_token_s(recent, 0.99),
    )


def _state(target: Target) -> str:
    if not target.is_healthy:
        return "down"
    if target.ejection.is_active:
        return "ejected"
    if target.breaker.is_open:
        return "circuit open"
    if target.is_starting:
        return "starting"
    return "full" if target.is_full else "ready"


def _answered(targets: Sequence[Target]) -> list[AttemptOutcome]:
    kept = [one for target in targets for one in target.recent or ()]
    return [one for one in kept if one.has_token and one.waited_ms is not None]


def _first_token_s(answered: Sequence[AttemptOutcome], quantile: float) -> float | None:
    # A policy that reads no requests does not know which ones are streams.
    times = [one for one in answered if one.is_streamed] or answered
    sorted_ms = sorted(one.waited_ms or 0.0 for one in times)
    return sorted_ms[int(quantile * len(times))] / 1e3 if times else None
