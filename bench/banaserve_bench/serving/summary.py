"""Figures of a cell's records: throughput, latency, goodput. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from banaserve_bench.loadgen.client import RequestRecord
from banaserve_bench.results.statistics import percentile
from banaserve_bench.serving.cell import CellId, Sent

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2e")
_MAX_SAMPLES = 2000


class Slo(NamedTuple):
    """Limits in seconds for a request to count as good output; None sets no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def kept_by(self, record: RequestRecord) -> bool:
        """Return whether a request succeeded within the limits; without a gap it meets any TPOT."""
        if record.error is not None or record.ttft_s is None:
            return False
        is_early = self.ttft_s is None or record.ttft_s <= self.ttft_s
        tpot = tpot_s(record)
        return is_early and (self.tpot_s is None or tpot is None or tpot <= self.tpot_s)


class Summary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Figures of a cell; they count all requests after the warm-up.

    Attributes:
        load: Requested rate in requests a second, or requests in progress; null for a trace at its
            own speed.
        completed: Number of requests that succeeded; ``failed`` counts the others, of which
            ``timed_out`` and ``interrupted`` are parts.
        errors: Number of occurrences of each error.
        metrics: Values by name; ``unit_of`` gives the unit. A metric that no request yields is left
            out.
        samples: Latency of each request (``itl``: of each gap) in seconds, sorted, for plots; every
            n-th one where there are more than 2,000.
    """

    load: float | None
    is_closed: bool
    seed: int
    requests: int
    completed: int
    failed: int
    timed_out: int
    interrupted: int
    warm_up_requests: int
    cut_prompts: int
    errors: dict[str, int]
    metrics: dict[str, float]
    samples: dict[str, list[float]]

    @property
    def load_name(self) -> str:
        return CellId(self.load, self.seed, self.is_closed).load_name


UNITS = {
    "requests_per_s": "requests/s",
    "offered_per_s": "requests/s",
    "output_tokens_per_s": "tokens/s",
    "weighted_tokens_per_s": "tokens/s",
    "goodput_per_s": "requests/s",
    "slo_fraction": "fraction",
    "failed_fraction": "fraction",
    "exact_output_fraction": "fraction",
    "prompt_tokens_mean": "tokens",
    "output_tokens_mean": "tokens",
    "cached_fraction": "fraction",
    "send_delay_p99": "s",
    "client_cpu_fraction": "fraction",
}


def unit_of(metric: str) -> str:
    """Return the unit of a metric: seconds for all latencies."""
    return UNITS.get(metric, "s")


def output_tokens(record: RequestRecord) -> int:
    """Return the number of output tokens: by the server's count, else by the events seen."""
    if record.completion_tokens is not None:
        return record.completion_tokens
    return len(record.token_at_s)


def tpot_s(record: RequestRecord) -> float | None:
    """Return the seconds per token after the first; None with fewer than two tokens.

    The number of tokens is the server's count if it gives one, since an event may carry several.
    """
    count = output_tokens(record)
    if record.first_token_at_s is None or count < 2 or not record.token_at_s:
        return None
    return (record.token_at_s[-1] - record.first_token_at_s) / (count - 1)


def summarize(cell: CellId, sent: Sequence[Sent], slo: Slo, client_cpu_fraction: float) -> Summary:
    """Return the figures of one cell.

    Throughput has the two definitions of ``seed-systems``, both over the time from the first
    request's arrival to the last success's end: output tokens a second, and (input + 2 x output)
    tokens a second as SkyWalker's scripts count them.
    """
    counted = [one for one in sent if not one.is_warm_up]
    records = [one.record for one in counted]
    succeeded = [record for record in records if record.error is None]
    samples = _samples(succeeded)
    metrics = _throughput(counted, slo)
    for name, values in samples.items():
        if values:
            metrics[f"{name}_mean"] = sum(values) / len(values)
            for percent in PERCENTILES:
                metrics[f"{name}_p{percent}"] = percentile(values, percent)
    metrics |= _lengths(counted)
    metrics["client_cpu_fraction"] = client_cpu_fraction
    return Summary(
        load=cell.load,
        is_closed=cell.is_closed,
        seed=cell.seed,
        requests=len(records),
        completed=len(succeeded),
        failed=len(records) - len(succeeded),
        timed_out=sum((record.error or "").startswith("timed out") for record in records),
        interrupted=sum(record.error == "interrupted" for record in records),
        warm_up_requests=len(sent) - len(counted),
        cut_prompts=sum(one.is_cut for one in counted),
        errors=dict(Counter(one.error for one in records if one.error is not None)),
        metrics=metrics,
        samples={name: _thinned(values) for name, values in samples.items()},
    )


def _samples(succeeded: Sequence[RequestRecord]) -> dict[str, list[float]]:
    tpot = (tpot_s(record) for record in succeeded)
    return {
        "ttft": [record.ttft_s for record in succeeded if record.ttft_s is not None],
        "tpot": [value for value in tpot if value is not None],
        "itl": [gap for record in succeeded for gap in record.gaps_s],
        "e2e": [record.latency_s for record in succeeded if record.latency_s is not None],
    }


def _throughput(counted: Sequence[Sent], slo: Slo) -> dict[str, float]:
    records = [one.record for one in counted]
    succeeded = [one for one in counted if one.record.error is None]
    if not records:
        return {}
    arrivals = [record.arrival_s for record in records]
    good = sum(slo.kept_by(record) for record in records)
    found = {
        "failed_fraction": 1 - len(succeeded) / len(records),
        "slo_fraction": good / len(records),
    }
    offered_s = max(arrivals) - min(arrivals)
    if offered_s > 0 and records[0].due_at_s is not None:
        found["offered_per_s"] = (len(records) - 1) / offered_s
    ends = [one.record.ended_at_s for one in succeeded if one.record.ended_at_s is not None]
    span_s = max(ends, default=0.0) - min(arrivals)
    if not ends or span_s <= 0:
        return found
    output = sum(output_tokens(one.record) for one in succeeded)
    prompt = sum(map(_prompt_tokens, succeeded))
    return found | {
        "requests_per_s": len(succeeded) / span_s,
        "goodput_per_s": good / span_s,
        "output_tokens_per_s": output / span_s,
        "weighted_tokens_per_s": (prompt + 2 * output) / span_s,
    }


def _prompt_tokens(sent: Sent) -> int:
    """Return the number of prompt tokens: by the server's count, else as they were sent."""
    return sent.record.prompt_tokens or sent.prompt_tokens


def _lengths(counted: Sequence[Sent]) -> dict[str, float]:
    done = [one for one in counted if one.record.error is None]
    if not done:
        return {}
    delays = [
        one.record.sent_at_s - one.record.due_at_s
        for one in counted
        if one.record.due_at_s is not None
    ]
    prompt = list(map(_prompt_tokens, done))
    cached = [one.record.cached_tokens for one in done if one.record.cached_tokens is not None]
    found = {
        "prompt_tokens_mean": sum(prompt) / len(done),
        "output_tokens_mean": sum(output_tokens(one.record) for one in done) / len(done),
        "exact_output_fraction": sum(output_tokens(one.record) == one.output_tokens for one in done)
        / len(done),
    }
    if cached:
        found["cached_fraction"] = sum(cached) / max(1, sum(prompt))
    if delays:
        found["send_delay_p99"] = percentile(delays, 99)
    return found


def _thinned(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    step = -(-len(ordered) // _MAX_SAMPLES) or 1
    return [round(value, 5) for value in ordered[::step]]
