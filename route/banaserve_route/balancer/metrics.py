"""Counters of one balancer, converted into Prometheus metrics on request.

Counting with a library's thread-safe metrics would cost more than relaying a chunk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from banaserve_route.balancer.targets.target import Target
from banaserve_route.policies.caches.known_caches import CacheState, KnownCaches
from banaserve_route.policies.interface import Flight
from banaserve_route.policies.shadow import ShadowCount, ShadowedPolicy

_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 300)


class _Histogram:
    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(_BOUNDS_S, value)] += 1
        self._sum += value

    def family(self, name: str, what: str) -> Metric:
        buckets, total = [], 0
        for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(name, what)
        family.add_metric([], buckets, self._sum)
        return family


class Metrics(Collector):
    """Counters of one balancer; times are seconds."""

    def __init__(self) -> None:
        self._answers: Counter[int] = Counter()
        self._refused: Counter[int] = Counter()
        self._dropped: Counter[str] = Counter()
        self.num_connections: Callable[[], int] = int
        self._over_limits: Counter[str] = Counter()
        self._waits, self._first, self._durations = _Histogram(), _Histogram(), _Histogram()
        self._num_cancelled = 0
        self._num_reads = 0
        self.targets: Callable[[], Iterable[Target]] = tuple
        self.queue_length: Callable[[], int] = int
        self.num_under_way: Callable[[], int] = int
        self.shadow: ShadowedPolicy | None = None
        self.caches = KnownCaches()
        self.prompts: Counter[str] = Counter()
        self.hedges: Counter[str] = Counter()
        self.num_relay_ends = 0

    def ended(
        self, status: int, arrived_s: float, now_s: float, num_reads: int, flights: list[Flight]
    ) -> None:
        """Count a request whose answer came in ``num_reads`` parts.

        Args:
            status: Status of the answer; 502 also if it broke off, 0 if the client went away.
            flights: Attempts of the request.
        """
        self._num_reads += num_reads
        after_s = now_s - arrived_s
        if flights:
            first = flights[0]
            self._waits.add(first.sent_s - arrived_s)
            for one in flights:
                if one.first_token_s is not None:
                    self._first.add(one.first_token_s - arrived_s)
        if not status:
            self._num_cancelled += 1
            return
        self._answers[status] += 1
        self._durations.add(after_s)

    @property
    def num_answers(self) -> tuple[int, int]:
        """Return the number of answers, and of those with a status of 500 or more."""
        answers = self._answers
        return answers.total(), sum(count for status, count in answers.items() if status >= 500)

    def refused(self, status: int) -> None:
        """Count a request that was refused before it was complete."""
        self._refused[status] += 1

    def dropped(self, cause: str) -> None:
        """Count a client connection that was closed without an answer."""
        self._dropped[cause] += 1

    def over_limit(self, limit: str) -> None:
        """Count a request beyond a limit of its key."""
        self._over_limits[limit] += 1

    def page(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        name = "banaserve_route_"
        yield _counter(name + "answers", "Answers to whole requests.", ["status"], self._answers)
        yield _counter(name + "refused", "Refused before complete.", ["status"], self._refused)
        yield _counter(name + "dropped", "Connections closed unanswered.", ["cause"], self._dropped)
        yield _counter(name + "over_limits", "Beyond limits of keys.", ["limit"], self._over_limits)
        yield GaugeMetricFamily(
            name + "connections", "Open connections of clients.", value=self.num_connections()
        )
        yield CounterMetricFamily(
            name + "cancelled", "Clients that went away.", value=self._num_cancelled
        )
        yield CounterMetricFamily(name + "reads", "Relayed parts.", value=self._num_reads)
        yield self._waits.family(name + "wait_seconds", "Time until a target is chosen.")
        yield self._first.family(name + "first_byte_seconds", "Time to the first byte.")
        yield self._durations.family(name + "duration_seconds", "Time to the last byte.")
        yield GaugeMetricFamily(name + "waiting", "Queued requests.", value=self.queue_length())
        yield GaugeMetricFamily(
            name + "under_way", "Requests under way.", value=self.num_under_way()
        )
        yield _counter(name + "hedges", "Late requests.", ["outcome"], self.hedges)
        yield CounterMetricFamily(name + "relay_ends", "Ended relays.", value=self.num_relay_ends)
        yield from self._of_caches()
        yield from self._of_shadow()
        yield from self._of_targets()

    def _of_caches(self) -> Iterator[Metric]:
        name, states = "banaserve_route_", self.caches.states()
        views = GaugeMetricFamily(
            name + "kv_views", "Replicas with KV events, by what is known.", labels=["state"]
        )
        for state in CacheState:
            views.add_metric([state], states[state])
        yield views
        yield _counter(
            name + "kv_events", "Batches, replays and faults.", ["kind"], self.caches.counts
        )
        yield _counter(name + "prompts", "Prompts read for tokens.", ["outcome"], self.prompts)

    def _of_shadow(self) -> Iterator[Metric]:
        if self.shadow is None:
            return
        readers: dict[str, Callable[[ShadowCount], float]] = {
            "decisions": lambda one: one.num_requests,
            "first_tokens": lambda one: one.num_first_tokens,
            "first_token_seconds": lambda one: one.first_token_s,
        }
        for key, read in readers.items():
            what = f"Of requests by the shadow policy's choice: {key}."
            family = CounterMetricFamily(f"banaserve_route_shadow_{key}", what, labels=["choice"])
            for choice, count in self.shadow.counts.items():
                family.add_metric([choice], float(read(count)))
            yield family
        yield CounterMetricFamily(
            "banaserve_route_shadow_failed_events",
            "Outcomes of requests that the shadow policy failed to take in.",
            self.shadow.num_failed_events,
        )

    def _of_targets(self) -> Iterator[Metric]:
        name, targets = "banaserve_route_target_", list(self.targets())
        gauges: dict[str, Callable[[Target], float]] = {
            "available": lambda one: one.view.is_available,
            "healthy": lambda one: one.is_healthy,
            "circuit_open": lambda one: one.breaker.is_open,
            "ejected": lambda one: one.ejection.is_active,
            "outstanding": lambda one: one.view.outstanding,
            "pending": lambda one: one.view.pending,
            "round_trip_ms": lambda one: one.view.round_trip_ms,
        }
        counters: dict[str, Callable[[Target], float]] = {
            "broken": lambda one: one.num_broken,
            "retried": lambda one: one.num_retried,
            "circuit_opened": lambda one: one.breaker.num_opened,
        }
        for kind, readers in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for key, read in readers.items():
                family = kind(name + key, f"Of a target: {key}.", labels=["target"])
                for one in targets:
                    family.add_metric([one.view.id], float(read(one)))
                yield family
        by_label: tuple[tuple[str, str, str, Callable[[Target], Mapping[Any, int]]], ...] = (
            ("decisions", "First targets.", "reason", lambda one: one.num_decisions),
            ("target_answers", "Answers of a target.", "status", lambda one: one.num_answers),
            (
                "target_ejections",
                "Ejections as an outlier.",
                "reason",
                lambda one: one.ejection.counts,
            ),
        )
        for key, what, label, read_all in by_label:
            family = CounterMetricFamily(f"banaserve_route_{key}", what, labels=["target", label])
            for one in targets:
                for value, count in read_all(one).items():
                    family.add_metric([one.view.id, str(value)], count)
            yield family


def _counter(
    name: str, what: str, labels: list[str], counts: Counter[int] | Counter[str]
) -> Metric:
    family = CounterMetricFamily(name, what, labels=labels)
    for key, count in counts.items():
        family.add_metric([str(key)], count)
    return family
