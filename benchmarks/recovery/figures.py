"""Figures of recovery, from each killed stream and its trace, and from all of them together.

Pure: nothing here asks a server or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from banaserve.base.errors import UserError
from banaserve.contracts.trace_events import (
    CopiesEnded,
    EngineReceived,
    LegBegan,
    LegFailed,
    LegOutput,
    RequestTrace,
    StepsPlanned,
    TraceLine,
)
from banaserve_bench.results.statistics import median, paired_ratios, percentile
from benchmarks.measurement import Samples

HEADLINE_TOKENS = 2_000
"""Context in tokens of the ratio that has a goal."""
ENOUGH_FOR_P99 = 100


@dataclass(frozen=True, slots=True)
class TracedRecovery:
    """Times and counts of a trace, from an instance's death to the next token.

    Attributes:
        resumed_tokens: Number of output tokens that the stream had when it resumed.
        detection_s: Time from the kill until the front door let the stream resume elsewhere.
        routing_s: Time from there until the stream was sent to another instance.
        leg_s: Time from that sending until the front door had a token of that instance.
        waited_s: Part of ``leg_s`` until the engine's scheduler saw the request. None, as all
            below, if the engine has no store and so keeps no notes.
        fetch_s: Time of all copies of the fetch, which run beside the forward pass.
        compute_s: Time of the forward pass of the step that fetched.
        fetched_blocks: Number of blocks that the instance did not have to compute.
        recomputed_tokens: Number of tokens that the instance computed again.
    """

    resumed_tokens: int
    detection_s: float
    routing_s: float
    leg_s: float
    waited_s: float | None = None
    fetch_s: float | None = None
    compute_s: float | None = None
    fetched_blocks: int | None = None
    recomputed_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class KilledStream:
    """A stream whose instance was killed.

    Attributes:
        pause_s: Time between the last token before the death and the first one after it.
        is_equal: True if the tokens are those of the same request without a kill.
    """

    prompt_tokens: int
    pause_s: float
    is_equal: bool
    traced: TracedRecovery


@dataclass(frozen=True, slots=True)
class KilledPair:
    """The same stream killed on both servers, at the same token."""

    stored: KilledStream
    recomputed: KilledStream


@dataclass(slots=True)
class RecoverySamples:
    """All measured samples.

    Attributes:
        pairs: Pairs by context, one for each kill.
        ttft_s: Times to first token of greedy and of sampled requests, one list for each run.
    """

    pairs: dict[int, list[KilledPair]] = field(default_factory=dict)
    ttft_s: dict[str, list[list[float]]] = field(default_factory=dict)


def pause_s(token_at_s: Sequence[float], resumed_tokens: int) -> float:
    """Return the time between the last token that one instance sent and the next one's first.

    Raises:
        UserError: No token came before or after the death.
    """
    if not 0 < resumed_tokens < len(token_at_s):
        raise UserError(
            f"a stream of {len(token_at_s)} tokens that went on after {resumed_tokens} has no pause"
        )
    return token_at_s[resumed_tokens] - token_at_s[resumed_tokens - 1]


def read_trace(trace: RequestTrace, killed_s: float) -> TracedRecovery:
    """Return the times and counts of one death in ``trace``.

    Args:
        killed_s: Time of the kill since the request's arrival.

    Raises:
        UserError: The stream did not resume after a death, or there were several deaths.
    """
    deaths = [line for line in trace.lines if isinstance(line.event, LegFailed)]
    if len(deaths) != 1:
        raise UserError(f"{len(deaths)} instances died under a stream, not one: run it again")
    later = [line for line in trace.lines if line.at_s >= deaths[0].at_s]
    began = next((one for one in later if isinstance(one.event, LegBegan)), None)
    first = next((one for one in later if isinstance(one.event, LegOutput)), None)
    if began is None or first is None:
        raise UserError("a stream did not go on after the kill: run it again")
    assert isinstance(began.event, LegBegan)
    to_token = TracedRecovery(
        resumed_tokens=began.event.resumed_tokens,
        detection_s=deaths[0].at_s - killed_s,
        routing_s=began.at_s - deaths[0].at_s,
        leg_s=first.at_s - began.at_s,
    )
    engine = [line for line in later if line.process == began.event.instance]
    return _with_engine(to_token, began.at_s, engine)


def _with_engine(
    found: TracedRecovery, began_s: float, lines: Sequence[TraceLine]
) -> TracedRecovery:
    """Return ``found`` with the engine's notes; unchanged if the engine keeps none."""
    received = next((one for one in lines if isinstance(one.event, EngineReceived)), None)
    if received is None:
        return found
    spans = [one.event for one in lines if isinstance(one.event, StepsPlanned)]
    copies = [one.event for one in lines if isinstance(one.event, CopiesEnded)]
    fetches = [one for one in copies if one.fetched_blocks]
    return replace(
        found,
        waited_s=received.at_s - began_s,
        fetch_s=sum(one.fetch_s for one in fetches),
        compute_s=sum(one.compute_s or 0.0 for one in fetches),
        fetched_blocks=sum(one.fetched_blocks for one in spans),
        recomputed_tokens=sum(one.num_tokens for one in spans if one.phase == "prompt"),
    )


def figures_of(samples: RecoverySamples, block_tokens: int) -> Samples:
    """Return samples and unit of each figure; those with a goal come first."""
    every = [pair for pairs in samples.pairs.values() for pair in pairs]
    streams = [stream for pair in every for stream in (pair.stored, pair.recomputed)]
    detected = [stream.traced.detection_s for stream in streams]
    figures: Samples = {}
    if headline := samples.pairs.get(HEADLINE_TOKENS):
        figures["recovery_vs_recompute"] = (_ratios(headline), "ratio")
    ttft_s = {name: [median(one) for one in runs] for name, runs in samples.ttft_s.items()}
    figures["first_token_sampled_ratio"] = (
        paired_ratios(ttft_s["sampled"], ttft_s["greedy"]),
        "ratio",
    )
    figures["equal_fraction"] = ([sum(one.is_equal for one in streams) / len(streams)], "fraction")
    figures["detection"] = (detected, "s")
    for context, pairs in sorted(samples.pairs.items()):
        of_context = _of_context(pairs, block_tokens)
        figures.update((f"{name}.{context}", found) for name, found in of_context)
    for name, medians in ttft_s.items():
        figures[f"first_token_{name}"] = (medians, "s")
    return figures


def _ratios(pairs: Sequence[KilledPair]) -> list[float]:
    return paired_ratios(
        [pair.stored.pause_s for pair in pairs], [pair.recomputed.pause_s for pair in pairs]
    )


def _of_context(
    pairs: Sequence[KilledPair], block_tokens: int
) -> Iterator[tuple[str, tuple[list[float], str]]]:
    stored = [pair.stored for pair in pairs]
    recomputed = [pair.recomputed for pair in pairs]
    yield "recovery_vs_recompute", (_ratios(pairs), "ratio")
    for name, streams in (("pause", stored), ("pause_recompute", recomputed)):
        pauses = [stream.pause_s for stream in streams]
        yield name, (pauses, "s")
        if len(pauses) >= ENOUGH_FOR_P99:
            yield f"{name}_p99", ([percentile(pauses, 99)], "s")
    yield "leg", ([stream.traced.leg_s for stream in stored], "s")
    yield "leg_recompute", ([stream.traced.leg_s for stream in recomputed], "s")
    for name, part in (("engine_wait", "waited_s"), ("fetch", "fetch_s"), ("compute", "compute_s")):
        yield name, ([getattr(stream.traced, part) or 0.0 for stream in stored], "s")
    tokens = [float(stream.traced.recomputed_tokens or 0) for stream in stored]
    yield "recomputed_tokens", (tokens, "tokens")
    decoded = [  # fetched blocks that the prompt alone does not fill
        float((one.traced.fetched_blocks or 0) - one.prompt_tokens // block_tokens)
        for one in stored
    ]
    yield "decoded_blocks_fetched", (decoded, "blocks")
