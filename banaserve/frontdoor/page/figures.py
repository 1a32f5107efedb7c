"""Latencies and rates of the last seconds, from requests and instances. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from banaserve.base.types import ObservedRequest
from banaserve.contracts.control_api import InstanceStatus
from banaserve.frontdoor.page.records import Figures

WINDOW_S = 30.0
"""Window of the figures, in seconds: long enough for a p99 that does not jump with each request."""


def figures_of(
    instances: Sequence[InstanceStatus],
    requests: Iterable[ObservedRequest],
    now_s: float,
    cpu_fraction: float | None = None,
) -> Figures:
    """Return the figures of one moment.

    Args:
        requests: Requests under way, and requests that have ended within ``WINDOW_S``.
        now_s: Time on the clock of ``requests``, in seconds.
    """
    known = list(requests)
    since_s = now_s - WINDOW_S
    ttft_s = [
        one.first_s - one.arrival_s
        for one in known
        if one.first_s is not None and one.first_s >= since_s
    ]
    tpot_s = [value for one in known if (value := _tpot_s(one, since_s, now_s)) is not None]
    memory = [one.memory for one in instances if one.memory is not None]
    compute = [one.compute for one in instances if one.compute is not None]
    gpus = [one.gpu_busy_fraction for one in instances if one.gpu_busy_fraction is not None]
    return Figures(
        num_running=sum(one.num_running for one in instances),
        num_waiting=sum(one.num_waiting for one in instances),
        ttft_p50_s=quantile(ttft_s, 0.5),
        ttft_p99_s=quantile(ttft_s, 0.99),
        tpot_p50_s=quantile(tpot_s, 0.5),
        tpot_p99_s=quantile(tpot_s, 0.99),
        tokens_per_s=sum(_tokens_within(one, since_s, now_s) for one in known) / WINDOW_S,
        requests_per_s=sum(one.arrival_s >= since_s for one in known) / WINDOW_S,
        kv_mean_fraction=_mean(memory),
        kv_max_fraction=max(memory, default=None),
        compute_mean_fraction=_mean(compute),
        gpu_fraction=_mean(gpus),
        cpu_fraction=cpu_fraction,
    )


def quantile(values: Sequence[float], fraction: float) -> float | None:
    """Return the smallest value that ``fraction`` of the values do not exceed; None if empty."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _tpot_s(one: ObservedRequest, since_s: float, now_s: float) -> float | None:
    """Return the time per token after the first; None if there is none, or no recent one."""
    if one.first_s is None or one.output_tokens < 2:
        return None
    until_s = now_s if one.end_s is None else one.end_s
    if until_s < since_s:
        return None
    return (until_s - one.first_s) / (one.output_tokens - 1)


def _tokens_within(one: ObservedRequest, since_s: float, now_s: float) -> float:
    """Return the output tokens since ``since_s``, assuming an even rate after the first token."""
    if one.first_s is None or not one.output_tokens:
        return 0.0
    until_s = now_s if one.end_s is None else one.end_s
    first = float(one.first_s >= since_s)
    if until_s <= one.first_s:
        return first * one.output_tokens
    lately_s = max(0.0, until_s - max(since_s, one.first_s))
    return first + (one.output_tokens - 1) * lately_s / (until_s - one.first_s)
