"""Figures of the comparison, from the passes of all rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from banaserve_bench.results.statistics import median, paired_ratios
from benchmarks.measurement import Samples

OURS = "banaserve"
PEERS = ("round-robin", "prefix-affinity")
SYSTEMS = (OURS, *PEERS)


class Work(NamedTuple):
    """Work of engines: differences separate batching and routing from the speed of a step.

    Attributes:
        steps: Number of steps of all engines.
        cached_tokens: Prompt tokens that were not computed: from the prefix cache and the store.
    """

    steps: float
    cached_tokens: float


class LoadSample(NamedTuple):
    """Results of one system with one load in one round.

    Attributes:
        requests_per_s: Requests a second with a fixed number of conversations under way.
        ttft_s: Median time to first token of the requests of conversations with given arrivals.
        latency_s: Mean time to the last token of the same requests, which a system that gives
            priority to first tokens may increase.
        cpu_s: CPU seconds per request of all the system's processes, over both passes.
        tokens: Token ids of every answer.
        work: Work per request, over both passes.
    """

    requests_per_s: float
    ttft_s: float
    latency_s: float
    cpu_s: float
    tokens: list[list[int]]
    work: Work


LoadSamples = Mapping[tuple[str, str], Sequence[LoadSample]]
"""Samples by load and system, one for each round."""

_RATIOS = (
    ("requests", "requests_per_s", "cpu_ratio_min"),
    ("ttft", "ttft_s", "cpu_ratio_min"),
    ("cpu_seconds", "cpu_s", "cpu_seconds_ratio_min"),
)
"""Ratios with the figure that has their least median; only of requests more is better."""

_OF_SYSTEM: Mapping[str, tuple[str, Callable[[LoadSample], float]]] = {
    "requests_per_s": ("requests/s", lambda one: one.requests_per_s),
    "ttft": ("s", lambda one: one.ttft_s),
    "latency": ("s", lambda one: one.latency_s),
    "cpu_per_request": ("s", lambda one: one.cpu_s),
    "steps_per_request": ("steps", lambda one: one.work.steps),
    "cached_per_request": ("tokens", lambda one: one.work.cached_tokens),
}


def figures(samples: LoadSamples) -> Samples:
    """Return all figures; ratios are of one round, and above 1 ours is better."""
    found: Samples = {}
    medians: dict[str, list[float]] = defaultdict(list)
    loads = list(dict.fromkeys(load for load, _ in samples))
    for load in loads:
        for kind, attribute, least in _RATIOS:
            for peer in PEERS:
                ours, theirs = (
                    [getattr(one, attribute) for one in samples[load, system]]
                    for system in (OURS, peer)
                )
                pair = (ours, theirs) if kind == "requests" else (theirs, ours)
                ratios = paired_ratios(*pair)
                found[f"{load}.{kind}_ratio.{peer}"] = ratios, "ratio"
                medians[least].append(median(ratios))
        for system in SYSTEMS:
            for name, (unit, value) in _OF_SYSTEM.items():
                found[f"{load}.{system}.{name}"] = [*map(value, samples[load, system])], unit
    found["equal_answers_fraction"] = [_equal_fraction(samples, loads)], "fraction"
    return {name: ([min(each)], "ratio") for name, each in medians.items()} | found


def _equal_fraction(samples: LoadSamples, loads: Sequence[str]) -> float:
    """Return the share of the others' answers that equal round robin's, token by token."""
    pairs = [
        (answer, theirs)
        for load in loads
        for system in SYSTEMS
        if system != "round-robin"
        for one, other in zip(samples[load, system], samples[load, "round-robin"], strict=True)
        for answer, theirs in zip(one.tokens, other.tokens, strict=True)
    ]
    return sum(answer == theirs for answer, theirs in pairs) / len(pairs)
