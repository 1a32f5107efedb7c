"""Figures of the comparison, from the passes of all rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rich.table import Table

from banaserve_bench.results.result import Figure, figure
from banaserve_bench.results.statistics import median, paired_ratios

OURS = "banaserve"
PEERS = ("round-robin", "prefix-affinity")
SYSTEMS = (OURS, *PEERS)
_A_REQUEST = ("CPU s a request", "steps a request", "cached tokens a request")


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


Samples = Mapping[tuple[str, str], Sequence[LoadSample]]
"""Samples by load and system, one for each round."""


def figures(samples: Samples) -> dict[str, Figure]:
    """Return all figures; ratios are of one round, and above 1 ours is better."""
    found: dict[str, Figure] = {}
    least, least_cpu = [], []
    for load in loads_of(samples):
        for kind, ratios in (("requests", throughput_ratios), ("ttft", ttft_ratios)):
            by_peer = {peer: ratios(samples, load, peer) for peer in PEERS}
            for peer, values in by_peer.items():
                found[f"{load}.{kind}_ratio.{peer}"] = figure(values, "ratio")
            least.append(min(median(values) for values in by_peer.values()))
    for load in loads_of(samples):
        for peer in PEERS:
            values = cpu_seconds_ratios(samples, load, peer)
            found[f"{load}.cpu_seconds_ratio.{peer}"] = figure(values, "ratio")
            least_cpu.append(median(values))
        for system in SYSTEMS:
            own = samples[load, system]
            found[f"{load}.{system}.requests_per_s"] = figure(
                [one.requests_per_s for one in own], "requests/s"
            )
            found[f"{load}.{system}.ttft"] = figure([one.ttft_s for one in own], "s")
            found[f"{load}.{system}.latency"] = figure([one.latency_s for one in own], "s")
            found[f"{load}.{system}.cpu_per_request"] = figure([one.cpu_s for one in own], "s")
            steps = [one.work.steps for one in own]
            found[f"{load}.{system}.steps_per_request"] = figure(steps, "steps")
            cached = [one.work.cached_tokens for one in own]
            found[f"{load}.{system}.cached_per_request"] = figure(cached, "tokens")
    found["equal_answers_fraction"] = figure([equal_fraction(samples)], "fraction")
    first = {"cpu_ratio_min": min(least), "cpu_seconds_ratio_min": min(least_cpu)}
    return {name: figure([value], "ratio") for name, value in first.items()} | found


def loads_of(samples: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names of the loads, in their order."""
    return list(dict.fromkeys(load for load, _ in samples))


def throughput_ratios(samples: Samples, load: str, peer: str) -> list[float]:
    """Return our requests/s over the peer's, round by round."""
    return paired_ratios(
        [one.requests_per_s for one in samples[load, OURS]],
        [one.requests_per_s for one in samples[load, peer]],
    )


def ttft_ratios(samples: Samples, load: str, peer: str) -> list[float]:
    """Return the peer's median time to first token over ours, round by round."""
    return paired_ratios(
        [one.ttft_s for one in samples[load, peer]], [one.ttft_s for one in samples[load, OURS]]
    )


def cpu_seconds_ratios(samples: Samples, load: str, peer: str) -> list[float]:
    """Return the peer's CPU seconds per request over ours, round by round."""
    return paired_ratios(
        [one.cpu_s for one in samples[load, peer]], [one.cpu_s for one in samples[load, OURS]]
    )


def equal_fraction(samples: Samples) -> float:
    """Return the share of the others' answers that equal round robin's, token by token."""
    pairs = [
        (answer, theirs)
        for load in loads_of(samples)
        for system in SYSTEMS
        if system != "round-robin"
        for one, other in zip(samples[load, system], samples[load, "round-robin"], strict=True)
        for answer, theirs in zip(one.tokens, other.tokens, strict=True)
    ]
    return sum(answer == theirs for answer, theirs in pairs) / len(pairs)


def table(samples: Samples) -> Table:
    """Return a table with a row for each load and system: medians over the rounds."""
    shown = Table(title="medians over the rounds")
    for heading in ("load", "system", "requests/s", "TTFT, s", "latency, s", *_A_REQUEST):
        shown.add_column(heading, justify="left" if heading in ("load", "system") else "right")
    for (load, system), own in samples.items():
        shown.add_row(
            load,
            system,
            f"{median([one.requests_per_s for one in own]):.2f}",
            f"{median([one.ttft_s for one in own]):.3f}",
            f"{median([one.latency_s for one in own]):.3f}",
            f"{median([one.cpu_s for one in own]):.3f}",
            f"{median([one.work.steps for one in own]):.2f}",
            f"{median([one.work.cached_tokens for one in own]):.0f}",
        )
    return shown
