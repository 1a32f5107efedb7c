"""Parts of a request's time: from end to end, of every way that a request can take."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from banaserve.cli.admin.trace import span_rows
from banaserve.contracts.trace_events import (
    CopiesEnded,
    EngineReceived,
    GateDecided,
    LegBegan,
    LegEnded,
    LegFailed,
    LegOutput,
    LookedUp,
    MoveCommitted,
    NoInstance,
    Prepared,
    PromotionEnded,
    RequestEnded,
    RequestEvent,
    RequestSummary,
    Routed,
    StepsPlanned,
    TraceLine,
    TraceSpan,
)
from banaserve.engine.compat import engine as compat
from banaserve.engine.connector.scheduler_side.request_notes import ConnectorNotes
from banaserve.serving.tracing.request_log import HttpCall, RequestLog
from banaserve.serving.tracing.spans import FRONT_DOOR, spans_of
from banaserve.serving.tracing.trace_collection import TraceCollector


def front(at_s: float, event: RequestEvent, leg_id: str = "") -> TraceLine:
    return TraceLine(at_s, FRONT_DOOR, event, leg_id)


def steps(phase: str, first: int, num: int = 1, fetched: int = 0, saved: int = 0) -> StepsPlanned:
    return StepsPlanned(phase, first, first + num - 1, num, num, 0.1 * num, 0.15, fetched, saved)


def summary(**said: Any) -> RequestSummary:
    usual = {
        "id": "cmpl-1",
        "arrived_at_s": 0.0,
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "output_tokens": 3,
        "instances": [],
        "ttft_s": 1.0,
        "took_s": 3.0,
        "end": "length",
        "received_s": 0.25,
        "answered_s": 3.25,
    }
    return RequestSummary(**{**usual, **said})


ROUTED = Routed("load_aware", "p0", "d0", "two_legs")
PREFILL = [
    front(0.5, Prepared()),
    front(0.75, LookedUp(16, 0.125)),
    front(0.875, ROUTED, "r"),
    front(0.875, LegBegan("prefill", "p0", "r-p"), "r-p"),
    TraceLine(0.9, "p0", EngineReceived(100, True, None), "r-p"),
    TraceLine(0.95, "p0", PromotionEnded("arrived", 2, 2, 0.04, 0.05), "r-p"),
    TraceLine(0.96, "p0", GateDecided("fetch", 1, 1, 16, None, None, None), "r-p"),
    TraceLine(1.0, "p0", steps("prompt", 7, fetched=1, saved=6), "r-p"),
    TraceLine(1.4, "p0", CopiesEnded(7, 1, 6, 0.1, 0.3, 0, 0.15), "r-p"),
    front(1.5, LegEnded("prefill", "p0", "length", 16), "r-p"),
]
DECODE = [
    front(1.5, LegBegan("decode", "d0", "r"), "r"),
    TraceLine(1.6, "d0", EngineReceived(101, False, 100), "r"),
    TraceLine(1.625, "d0", steps("prompt", 40, fetched=7), "r"),
    TraceLine(1.75, "d0", CopiesEnded(40, 7, 0, 0.1, 0.1, 0), "r"),
    front(1.76, LegOutput("decode", "d0"), "r"),
    TraceLine(1.8, "d0", steps("decode", 41, 2, saved=1), "r"),
    front(2.9, LegEnded("decode", "d0", "length"), "r"),
]
END = [front(3.0, RequestEnded("length", 3))]


def told(spans: list[TraceSpan], parent: int = -1) -> list[tuple[str, float, float]]:
    found = [(one.name, one.start_s, one.end_s) for one in spans if one.parent == parent]
    return sorted(found, key=lambda one: one[1])


def accounted_s(spans: list[TraceSpan]) -> float:
    """Return the seconds that spans without a parent cover; overlaps count once."""
    covered_s, until_s = 0.0, float("-inf")
    for one in sorted((s for s in spans if s.parent < 0), key=lambda s: s.start_s):
        covered_s += max(0.0, one.end_s - max(until_s, one.start_s))
        until_s = max(until_s, one.end_s)
    return covered_s


def below(spans: list[TraceSpan], name: str) -> list[tuple[str, float, float]]:
    [index] = [i for i, one in enumerate(spans) if one.name == name and one.parent < 0]
    return [(n, round(a, 6), round(b, 6)) for n, a, b in told(spans, index)]


def test_a_request_of_two_legs_is_told_from_end_to_end() -> None:
    spans = spans_of(summary(), [*PREFILL, *DECODE, *END])
    assert told(spans) == [
        ("receive", -0.25, 0.0),
        ("prepare", 0.0, 0.5),
        ("route", 0.5, 0.875),
        ("queue", 0.875, 1.0),
        ("prefill", 1.0, 1.5),
        ("hand-over", 1.5, 1.8),
        ("decode", 1.8, 2.9),
        ("respond", 2.9, 3.25),
    ]
    assert accounted_s(spans) == pytest.approx(3.5)
    assert below(spans, "route") == [("lookup", 0.625, 0.75)]
    assert below(spans, "queue") == [("promote", 0.91, 0.95)]
    assert below(spans, "prefill") == [("fetch", 1.0, 1.1), ("save", 1.25, 1.4)]
    assert below(spans, "hand-over") == [("queue", 1.5, 1.625), ("fetch", 1.625, 1.725)]
    by_name = {one.name: one for one in spans if one.parent < 0}
    assert by_name["route"].attributes == {
        "reason": "two_legs",
        "policy": "load_aware",
        "prefill_instance": "p0",
        "decode_instance": "d0",
        "num_candidates": 0,
    }
    assert by_name["prefill"].attributes["fetch_decision"] == "fetch"
    assert by_name["decode"].attributes == {
        "tokens": 2,
        "steps": 2,
        "longest_gap_ms": 150.0,
        "saved_blocks": 1,
    }
    assert {one.process for one in spans} == {FRONT_DOOR, "p0", "d0"}
    assert all(one.parent < index for index, one in enumerate(spans))


DIED = LegFailed("decode", "d0", "EngineDeadError", 1, "tried again")
AGAIN = [
    front(2.25, NoInstance("none is ready"), "r"),
    front(2.5, Routed("load_aware", None, "d1", "single"), "r"),
    front(2.5, LegBegan("decode", "d1", "r", 2), "r"),
    TraceLine(2.55, "d1", EngineReceived(102, False, 102), "r"),
    TraceLine(2.6, "d1", steps("prompt", 3, fetched=6), "r"),
    TraceLine(2.7, "d1", steps("decode", 4), "r"),
    front(2.9, LegEnded("decode", "d1", "length"), "r"),
]

WAYS: dict[str, tuple[list[TraceLine], list[tuple[str, float, float]]]] = {
    "one leg": (
        [
            front(0.5, Prepared()),
            front(0.5, Routed("load_aware", None, "d0", "short_prompt"), "r"),
            front(0.6, LegBegan("whole", "d0", "r"), "r"),
            TraceLine(0.7, "d0", EngineReceived(100, False, None), "r"),
            TraceLine(0.8, "d0", steps("prompt", 7), "r"),
            TraceLine(1.0, "d0", steps("decode", 8, 2), "r"),
            front(2.9, LegEnded("whole", "d0", "length"), "r"),
        ],
        [("queue", 0.5, 0.8), ("prefill", 0.8, 1.0), ("decode", 1.0, 2.9)],
    ),
    "one token": (
        [
            front(0.5, Prepared()),
            front(0.5, Routed("load_aware", None, "d0", "short_prompt"), "r"),
            front(0.5, LegBegan("whole", "d0", "r"), "r"),
            TraceLine(0.7, "d0", EngineReceived(100, False, None), "r"),
            TraceLine(0.8, "d0", steps("prompt", 7), "r"),
            front(2.8, LegOutput("whole", "d0"), "r"),
            front(2.9, LegEnded("whole", "d0", "length"), "r"),
        ],
        [("queue", 0.5, 0.8), ("prefill", 0.8, 2.9)],
    ),
    "engines that tell nothing": (
        [one for one in [*PREFILL, *DECODE] if one.process == FRONT_DOOR],
        [("prefill", 0.875, 1.5), ("hand-over", 1.5, 1.76), ("decode", 1.76, 2.9)],
    ),
    "a death in mid-stream": (
        [*PREFILL, *DECODE[:-1], front(2.0, DIED, "r"), *AGAIN],
        [
            ("queue", 0.875, 1.0),
            ("prefill", 1.0, 1.5),
            ("hand-over", 1.5, 1.8),
            ("decode", 1.8, 2.0),
            ("route", 2.0, 2.5),
            ("queue", 2.5, 2.6),
            ("prefill", 2.6, 2.7),
            ("decode", 2.7, 2.9),
        ],
    ),
    "a death before the scheduler had it": (
        [
            *PREFILL[:4],
            front(1.0, LegFailed("prefill", "p0", "EngineDeadError", 1, "tried again"), "r"),
            front(1.1, ROUTED, "r"),
            front(1.1, LegBegan("prefill", "p1", "r-p"), "r-p"),
            front(1.5, LegEnded("prefill", "p1", "length", 16), "r-p"),
            *DECODE,
        ],
        [
            ("prefill", 0.875, 1.0),
            ("route", 1.0, 1.1),
            ("prefill", 1.1, 1.5),
            ("hand-over", 1.5, 1.8),
            ("decode", 1.8, 2.9),
        ],
    ),
    "another decode instance under another id": (
        [
            *PREFILL,
            *DECODE[:-1],
            front(2.0, LegFailed("decode", "d0", "drained", 0, "goes on elsewhere"), "r-m0"),
            front(2.25, ROUTED, "r-m0"),
            front(2.25, LegBegan("decode", "d1", "r-m0", 2), "r-m0"),
            TraceLine(2.5, "d1", EngineReceived(102, False, 102), "r-m0"),
            TraceLine(2.5, "d1", steps("prompt", 3), "r-m0"),
            TraceLine(2.75, "d1", steps("decode", 4), "r-m0"),
            front(2.9, LegEnded("decode", "d1", "length"), "r-m0"),
        ],
        [
            ("queue", 0.875, 1.0),
            ("prefill", 1.0, 1.5),
            ("hand-over", 1.5, 1.8),
            ("decode", 1.8, 2.0),
            ("route", 2.0, 2.25),
            ("queue", 2.25, 2.5),
            ("prefill", 2.5, 2.75),
            ("decode", 2.75, 2.9),
        ],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_parts_follow_each_other_on_every_way(way: str) -> None:
    lines, expected = WAYS[way]
    spans = spans_of(summary(), [*lines, *END])
    found = told(spans)
    assert found[3:-1] == expected
    assert found[-1] == ("respond", 2.9, 3.25)
    edges = [(one[2], other[1]) for one, other in itertools.pairwise(found)]
    assert all(end == start for end, start in edges)
    assert accounted_s(spans) == pytest.approx(3.5)


def test_a_retry_names_the_death_and_what_came_of_it() -> None:
    spans = spans_of(summary(), [*WAYS["a death in mid-stream"][0], *END])
    decode, again = [one for one in spans if one.name == "decode"]
    assert (decode.error, decode.process) == ("EngineDeadError; tried again", "d0")
    assert (again.error, again.process) == ("", "d1")
    route = [one for one in spans if one.name == "route"][1]
    assert (route.attributes["reason"], route.attributes["retries"]) == ("single", 1)
    [waited] = [one for one in spans if one.name == "wait for an instance"]
    assert (waited.start_s, waited.end_s, spans[waited.parent]) == (2.25, 2.5, route)
    prefill = [one for one in spans if one.name == "prefill"][1]
    assert prefill.attributes["resumed_tokens"] == 2


@pytest.mark.parametrize(
    ("lines", "last"),
    [
        (PREFILL[:1], ("prepare", 0.0, 0.5)),
        ([*PREFILL[:1], front(0.6, NoInstance("none"), "r")], ("wait for an instance", 0.5, 3.0)),
        (PREFILL[:5], ("queue", 0.875, 3.0)),
        (PREFILL[:8], ("prefill", 1.0, 3.0)),
        ([*PREFILL, *DECODE[:2]], ("hand-over", 1.5, 3.0)),
        ([*PREFILL, *DECODE[:-1]], ("decode", 1.8, 3.0)),
    ],
)
def test_a_request_under_way_is_told_until_now(
    lines: list[TraceLine], last: tuple[str, float, float]
) -> None:
    spans = spans_of(summary(end="", answered_s=None), lines)
    assert told(spans)[-1] == last


def test_each_sequence_has_its_own_parts_and_time_counts_once() -> None:
    second = [
        front(1.6, Routed("load_aware", "p0", "d0", "two_legs"), "1_r"),
        front(1.6, LegBegan("decode", "d0", "1_r"), "1_r"),
        TraceLine(1.7, "d0", EngineReceived(101, False, 100), "1_r"),
        TraceLine(1.8, "d0", steps("decode", 41), "1_r"),
        front(2.5, LegEnded("decode", "d0", "length"), "1_r"),
    ]
    first = [msgspec.structs.replace(one) for one in [*PREFILL, *DECODE]]
    for one in first:
        one.leg_id = f"0_{one.leg_id}" if one.leg_id else ""
        if isinstance(one.event, LegBegan):
            changed = f"0_{one.event.engine_request_id}"
            one.event = msgspec.structs.replace(one.event, engine_request_id=changed)
    spans = spans_of(summary(), sorted([*first, *second, *END], key=lambda one: one.at_s))
    names = [one.name for one in spans if one.parent < 0]
    assert (names.count("hand-over"), names.count("decode")) == (2, 2)
    assert (names.count("prefill"), names.count("respond")) == (1, 1)
    assert accounted_s(spans) == pytest.approx(3.5)


def test_a_move_that_a_leg_felt_is_part_of_it() -> None:
    moves = [
        front(2.0, MoveCommitted("d0", "m1", "layers 2 to 4", "p0", 0.125)),
        front(2.1, MoveCommitted("p0", "m2", "layers 0 to 1", None, 0.125)),
    ]
    lines = sorted([*PREFILL, *DECODE, *moves, *END], key=lambda one: one.at_s)
    spans = spans_of(summary(), lines)
    assert below(spans, "decode") == [("move", 1.875, 2.0)]
    [move] = [one for one in spans if one.name == "move"]
    assert move.attributes == {"move_id": "m1", "modules": "layers 2 to 4", "to": "p0"}


# ---- as it is collected


class At:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def now(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Machine:
    """An engine's client; the machine's clock is ``ahead_s`` ahead of the front door's."""

    def __init__(self, clock: At, ahead_s: float) -> None:
        self.clock, self._front = At(clock.now_s + ahead_s), clock
        self.notes, self.asked = ConnectorNotes(self.clock), 0
        self.engine_core = self

    async def call_utility_async(self, method: str, names: list[str]) -> object:
        self.asked += 1
        self._front.now_s += 0.001
        self.clock.now_s += 0.001
        connector = SimpleNamespace(notes_of=self.notes.answer)
        transfer = SimpleNamespace(kv_connector="StoreConnector")
        config = SimpleNamespace(kv_transfer_config=transfer)
        core = SimpleNamespace(scheduler=SimpleNamespace(connector=connector, vllm_config=config))
        answer = compat._notes(core, names)
        self._front.now_s += 0.001
        return msgspec.msgpack.decode(msgspec.msgpack.encode(answer))


@pytest.mark.parametrize("ahead_s", [0.0, 500.0, -30.0])
async def test_engines_of_other_machines_are_told_on_the_front_doors_clock(ahead_s: float) -> None:
    clock = At(100.0)
    machine = Machine(clock, ahead_s)
    log, kept = RequestLog(clock), []
    for name in ("a", "b"):
        with log.following(name, 10, HttpCall(clock.now(), 0.0)) as notes:
            notes.note(LegBegan("whole", "d0", name), name, 1)
            clock.now_s += 0.5
            machine.clock.now_s += 0.5
            machine.notes.received(name, 10, False, None)
            machine.notes.planned(1, [(name, 0, 10)])
            clock.now_s += 0.5
            machine.clock.now_s += 0.5
            kept.append(notes)
    instances: Any = {"d0": SimpleNamespace(llm=machine, incarnation=1)}
    traces = await TraceCollector(instances, clock).traces_of(kept)
    assert machine.asked == 1
    for trace in traces:
        [queue] = [one for one in trace.spans if one.name == "queue"]
        assert queue.end_s == pytest.approx(0.5, abs=1e-6)
        assert trace.missing == []


async def test_a_move_is_told_to_requests_that_ran_where_it_happened() -> None:
    clock = At(100.0)
    with RequestLog(clock).following("a", 10, HttpCall(clock.now(), 0.0)) as notes:
        notes.note(LegBegan("whole", "d0", "a"), "a", 1)
        clock.now_s += 1.0
    moves = [
        (100.5, MoveCommitted("d0", "m1", "layers", "p0", 0.1)),
        (100.5, MoveCommitted("p0", "m2", "layers", "d0", 0.1)),
        (99.5, MoveCommitted("d0", "m3", "layers", "p0", 0.1)),
    ]
    found = await TraceCollector({}, clock, lambda: moves).trace_of(notes)
    told_moves = [one.event for one in found.lines if isinstance(one.event, MoveCommitted)]
    assert [one.move_id for one in told_moves] == ["m1"]
    assert [one.name for one in found.spans if one.name == "move"] == ["move"]


# ---- as it is printed


def test_rows_are_one_below_another_on_one_scale() -> None:
    spans = spans_of(summary(), [*PREFILL, *DECODE, *END])
    heading, *rows = span_rows(spans)
    assert heading[0] == "PART"
    assert [row[0] for row in rows] == [
        *("receive", "prepare", "route", "  lookup", "queue", "  promote", "prefill", "  fetch"),
        *("  save", "hand-over", "  queue", "  fetch", "decode", "respond"),
    ]
    assert rows[2][1:3] == ("500.0", "375.0")
    assert rows[2][5].startswith("reason two_legs, policy load_aware")
    assert (rows[0][4].index("█"), len(rows[-1][4])) == (0, 32)


def test_of_nothing_there_is_no_row_and_a_moment_has_none_unless_it_failed() -> None:
    assert span_rows([]) == []
    quick = TraceSpan("route", 0.0, 1e-5, FRONT_DOOR)
    died = TraceSpan("decode", 1e-5, 2e-5, "d0", error="EngineDeadError")
    assert [row[0] for row in span_rows([quick, died])[1:]] == ["decode"]
