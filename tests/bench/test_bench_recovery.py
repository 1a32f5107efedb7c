"""What ``bench recovery`` makes of token times and traces, and what it refuses."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from banaserve.base.errors import UserError
from banaserve.contracts.trace_events import (
    CopiesEnded,
    EngineReceived,
    LegBegan,
    LegFailed,
    LegOutput,
    RequestSummary,
    RequestTrace,
    StepsPlanned,
    TraceLine,
)
from benchmarks.recovery import command as recovery
from benchmarks.recovery.figures import (
    ENOUGH_FOR_P99,
    KilledPair,
    KilledStream,
    RecoverySamples,
    TracedRecovery,
    figures_of,
    pause_s,
    read_trace,
)

FRONT = "front door"
BEFORE = [
    TraceLine(0.1, FRONT, LegBegan("prefill", "p0", "r-p")),
    TraceLine(1.0, FRONT, LegBegan("decode", "d0", "r", 1)),
    TraceLine(1.5, FRONT, LegOutput("decode", "d0")),
]
DEATH = TraceLine(4.25, FRONT, LegFailed("decode", "d0", "died", 1, "tried again"))
AFTER = [
    TraceLine(4.5, FRONT, LegBegan("decode", "d1", "r", 90)),
    TraceLine(5.5, FRONT, LegOutput("decode", "d1")),
]
ENGINE = [
    TraceLine(4.75, "d1", EngineReceived(2000, False, None)),
    TraceLine(4.8, "d1", StepsPlanned("prompt", 7, 7, 1, 80, 0.0, 0.0, 15, 0)),
    TraceLine(5.4, "d1", CopiesEnded(7, 15, 0, 0.125, 0.5, 0)),
    TraceLine(5.45, "d1", StepsPlanned("decode", 8, 30, 23, 23, 0.6, 0.1, 0, 1)),
    TraceLine(5.9, "d1", CopiesEnded(20, 0, 1, 0.0, 0.01, 0)),
]


def trace(*lines: TraceLine) -> RequestTrace:
    summary = RequestSummary("cmpl-r", 0.0, 1910, 0, 120, ["p0", "d0", "d1"], 0.5, 6.0, "length")
    return RequestTrace(summary, sorted(lines, key=lambda line: line.at_s), [])


def test_the_pause_lies_between_the_tokens_of_two_instances() -> None:
    # The longest gap is another one.
    assert pause_s([0.0, 0.1, 0.2, 1.2, 1.3, 9.0], 3) == pytest.approx(1.0)


@pytest.mark.parametrize("resumed", [0, 6, 7])
def test_no_pause_without_a_token_on_both_sides(resumed: int) -> None:
    with pytest.raises(UserError, match="has no pause"):
        pause_s([0.0, 0.1, 0.2, 1.2, 1.3, 9.0], resumed)


def test_a_trace_with_notes_of_the_engine() -> None:
    assert read_trace(trace(*BEFORE, DEATH, *AFTER, *ENGINE), 4.0) == TracedRecovery(
        resumed_tokens=90,
        detection_s=0.25,
        routing_s=0.25,
        leg_s=1.0,
        waited_s=0.25,
        fetch_s=0.125,
        compute_s=0.5,
        fetched_blocks=15,
        recomputed_tokens=80,
    )


def test_a_trace_of_an_engine_without_a_store() -> None:
    found = read_trace(trace(*BEFORE, DEATH, *AFTER), 4.0)
    assert found == TracedRecovery(90, 0.25, 0.25, 1.0)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((*BEFORE,), "^0 instances died"),
        ((*BEFORE, DEATH, DEATH, *AFTER), "^2 instances died"),
        ((*BEFORE, DEATH), "did not go on"),
        ((*BEFORE, DEATH, AFTER[0]), "did not go on"),
    ],
)
def test_a_trace_that_tells_of_no_recovery(lines: tuple[TraceLine, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_trace(trace(*lines), 4.0)


def pair(stored_s: float, recomputed_s: float) -> KilledPair:
    plain = TracedRecovery(90, 0.25, 0.0, recomputed_s)
    traced = replace(
        plain, leg_s=stored_s, waited_s=0.0, fetch_s=0.1, fetched_blocks=15, recomputed_tokens=80
    )
    return KilledPair(
        KilledStream(1864, stored_s, True, traced),
        KilledStream(1864, recomputed_s, recomputed_s < 8.0, plain),
    )


def test_ratios_are_those_of_pairs_and_runs() -> None:
    samples = RecoverySamples(
        {200: [pair(0.5, 0.5)], 2000: [pair(0.5, 4.0), pair(2.0, 8.0)]},
        {"greedy": [[1.0, 2.0, 9.0], [4.0]], "sampled": [[2.2], [1.0, 3.0]]},
    )
    figures = figures_of(samples, 128)
    assert next(iter(figures)) == "recovery_vs_recompute"
    assert figures["recovery_vs_recompute"][0] == [0.125, 0.25]
    assert figures["recovery_vs_recompute.200"][0] == [1.0]
    assert figures["first_token_sampled_ratio"][0] == pytest.approx([1.1, 0.5])
    assert figures["equal_fraction"][0] == pytest.approx([5 / 6])
    assert figures["pause_recompute.2000"][0] == [4.0, 8.0]
    assert figures["recomputed_tokens.2000"][0] == [80.0, 80.0]
    # 14 of the 15 fetched blocks hold nothing but prompt.
    assert figures["decoded_blocks_fetched.2000"][0] == [1.0, 1.0]
    assert len(figures["detection"][0]) == 6
    assert "pause_p99.2000" not in figures


def test_a_p99_takes_a_hundred_kills() -> None:
    pairs = [pair(1.0 + n, 1000.0) for n in range(ENOUGH_FOR_P99)]
    figures = figures_of(RecoverySamples({6000: pairs}, {"greedy": [[1.0]], "sampled": [[1.0]]}), 1)
    assert figures["pause_p99.6000"][0] == pytest.approx([99.01])
    assert "recovery_vs_recompute" not in figures


def test_the_notes_say_how_many_kills_there_were() -> None:
    options = argparse.Namespace(kills=4)
    told = recovery._slowest(options, 2)
    assert told.startswith("8 kills a context on each server; their maximum stands")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--runs", "0"], "above 0"),
        (["--contexts", "100"], "more than --decoded-tokens 136"),
        (["--contexts", "200", "8100"], "at most 8040"),
        (["--decoded-tokens", "64"], "more than half a block"),
    ],
)
def test_what_cannot_be_measured_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        recovery.main(argv)
