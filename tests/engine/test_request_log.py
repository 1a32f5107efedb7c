"""Notes of single requests: kept within bounds, found by id, put in one order, told in words."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from banaserve.base.errors import UserError
from banaserve.base.types import ClusterView, InstanceId, InstanceView, Role, Route
from banaserve.cli.admin.trace import heading, list_rows, parts_of, trace_rows
from banaserve.contracts.trace_events import (
    MAX_EVENTS,
    CopiesEnded,
    EngineFinished,
    EngineReceived,
    FirstToken,
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
    RequestTrace,
    RouteCandidate,
    Routed,
    StepsPlanned,
    StoreAsked,
)
from banaserve.engine.compat import engine as compat
from banaserve.engine.connector.metadata import StepResult
from banaserve.engine.connector.scheduler_side.request_notes import ConnectorNotes
from banaserve.serving.tracing.request_log import HttpCall, RequestLog, RequestNotes, SeenRoute
from banaserve.serving.tracing.trace_collection import TraceCollector


class Ticks:
    """A clock that is one second later each time it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        self.now_s += 1.0
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def followed(log: RequestLog, *ids: str) -> list[RequestNotes]:
    found = []
    for request_id in ids:
        with log.following(request_id, 5, HttpCall(log._clock.now(), 0.0)) as notes:
            found.append(notes)
    return found


# ---- the front door's


def test_the_log_keeps_what_is_under_way_and_the_last_that_have_ended() -> None:
    log = RequestLog(Ticks(), kept=3)
    with log.following("slow", 5, HttpCall(0.5, 0.0)):
        followed(log, *(f"r{i}" for i in range(5)))
        assert [one.id for one in log.last()] == ["slow", "r2", "r3", "r4"]
        assert [one.id for one in log.last(2)] == ["r3", "r4"]
        assert log.last()[0].end == ""
    assert [one.id for one in log.last()] == ["slow", "r3", "r4"]
    assert log.last(0) == []


def test_policies_see_more_requests_than_have_notes() -> None:
    log = RequestLog(Ticks(), kept=2)
    followed(log, "before")
    assert log.observed(0.0) == []
    log.observe(kept=4)
    with log.following("slow", 7, HttpCall(0.5, 0.0)) as slow:
        slow.tokens_so_far = lambda: 3
        followed(log, *(f"r{i}" for i in range(6)))
        slow.note(LegBegan("decode", "d0", "slow-1"), "slow-1", 1)
        first, *ended = log.observed(0.0)
    assert (first.prompt_tokens, first.output_tokens) == (7, 3)
    assert (first.instance, first.end_s) == (InstanceId("d0"), None)
    assert len(ended) == 4
    assert all(one.end_s is not None and one.instance is None for one in ended)
    assert [one.arrival_s for one in ended] == sorted(one.arrival_s for one in ended)
    last_s = ended[-1].arrival_s
    assert [one.arrival_s for one in log.observed(last_s)] == [last_s]
    assert len(log.last()) == 2


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("chatcmpl-abc", "chatcmpl-abc"),
        ("chatcmpl-ab", "chatcmpl-abc"),
        ("abc", "chatcmpl-abc"),
        ("cmpl-xyz", "cmpl-xyz-0"),
        ("same", "same"),
        ("nothing", None),
        ("bc", None),
    ],
)
def test_a_request_is_found_by_its_id_or_its_beginning(wanted: str, found: str | None) -> None:
    log = RequestLog(Ticks())
    followed(log, "chatcmpl-abc", "cmpl-xyz-0", "chatcmpl-other", "same", "same-1")
    [latest] = followed(log, "same")
    notes = log.find(wanted)
    assert (notes.request_id if notes else None) == found
    assert notes is latest or wanted != "same"


def test_a_beginning_of_several_names_them() -> None:
    log = RequestLog(Ticks())
    followed(log, *(f"cmpl-a-{i}" for i in range(7)))
    with pytest.raises(UserError, match=r"cmpl-a-0, .*cmpl-a-4 and 2 more: give more of the id"):
        log.find("cmpl-a")


def test_events_of_one_request_are_bounded_and_its_end_is_always_told() -> None:
    with RequestLog(Ticks()).following("s", 5, HttpCall(0.0, 0.0)) as notes:
        for _ in range(MAX_EVENTS + 3):
            notes.note(LegBegan("whole", "d0", "s-1"), "s-1", 1)
    assert len(notes.events()) == MAX_EVENTS + 1
    assert isinstance(notes.events()[-1].event, RequestEnded)
    assert (notes.num_dropped, len(notes.legs)) == (3, MAX_EVENTS)


@pytest.mark.parametrize(
    ("raised", "finish_reason", "how", "error"),
    [
        (None, "stop", "stop", ""),
        (GeneratorExit(), None, "closed", ""),
        (GeneratorExit(), "length", "length", ""),
        (RuntimeError("out of time"), None, "error", "out of time"),
        (compat.EngineDeadError(), None, "error", str(compat.EngineDeadError())),
    ],
)
def test_how_a_request_ended(
    raised: BaseException | None, finish_reason: str | None, how: str, error: str
) -> None:
    log = RequestLog(Ticks())
    expected: Any = pytest.raises(type(raised)) if raised is not None else nullcontext()
    with expected, log.following("r", 5, HttpCall(0.0, 0.0)) as notes:
        notes.finish_reason = finish_reason
        if raised is not None:
            raise raised
    assert notes.ended is not None
    assert (notes.ended[1].how, notes.ended[1].error) == (how, error)


# ---- an engine's


def steps_of(notes: ConnectorNotes, name: str) -> list[StepsPlanned]:
    [found] = notes.of(name)
    return [event for _, event in found.events if isinstance(event, StepsPlanned)]


def test_steps_of_one_phase_are_one_event() -> None:
    notes = ConnectorNotes(Ticks())
    notes.received("r", 100, False, None)
    for step, batch in enumerate(
        [("r", 0, 60), ("r", 60, 40), ("other", 0, 9), ("r", 100, 1), ("r", 101, 1)]
    ):
        notes.planned(step, [batch])
        if step in (1, 4):
            notes.copies(step, "r", saved=2)
    prompt, decode = steps_of(notes, "r")
    assert (prompt.phase, prompt.first_step, prompt.last_step) == ("prompt", 0, 1)
    assert (prompt.num_steps, prompt.num_tokens, prompt.saved_blocks) == (2, 100, 2)
    assert (decode.phase, decode.first_step, decode.last_step) == ("decode", 3, 4)
    assert (decode.num_steps, decode.num_tokens, decode.saved_blocks) == (2, 2, 2)
    assert (decode.took_s, decode.longest_gap_s) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("steps", "num_events"),
    [
        ([(0, 60), (60, 40), (0, 100), (100, 1)], 3),  # preempted within its prompt
        ([(0, 100), (100, 1), (101, 1), (0, 102), (102, 1)], 4),  # preempted in decode
        ([(0, 100), (0, 100)], 2),  # a failed fetch
        ([(0, 100), (100, 4), (102, 4), (106, 4)], 2),  # drafts that were not taken
    ],
)
def test_tokens_that_are_computed_again_begin_another_event(
    steps: list[tuple[int, int]], num_events: int
) -> None:
    notes = ConnectorNotes(Ticks())
    notes.received("r", 100, False, None)
    for step, (before, num) in enumerate(steps):
        notes.planned(step, [("r", before, num)])
    assert len(steps_of(notes, "r")) == num_events


def test_what_a_step_saved_is_told_when_it_has_ended_though_the_request_has() -> None:
    notes = ConnectorNotes(Ticks())
    notes.received("r-p", 100, True, None)
    notes.received("s", 100, False, None)
    notes.planned(7, [("r-p", 16, 84), ("s", 0, 100)])
    notes.copies(7, "r-p", fetched=1)
    notes.copies(7, "r-p", saved=6)
    notes.copies(7, "s", saved=6)
    notes.finished("r-p", 1)
    notes.step_done(StepResult(7, compute_s=0.5, fetch_s=0.1, fetched_blocks=1, saved_blocks=9))
    [found] = notes.of("r-p")
    assert found.events[-1][1] == CopiesEnded(7, 1, 6, 0.1, 0.5, 3)
    assert found.events[-2][1] == EngineFinished(1)


def test_an_engine_keeps_what_it_computes_and_its_last_requests() -> None:
    notes = ConnectorNotes(Ticks(), kept=2)
    for name in ("long", "a", "b", "c"):
        notes.received(name, 10, False, None)
    for name in ("a", "b", "c"):
        notes.finished(name, 1)
    notes.finished("never received", 1)
    assert [bool(notes.of(name)) for name in ("long", "a", "b", "c")] == [True, False, True, True]
    for step in range(2 * MAX_EVENTS):
        notes.planned(step, [("long", 0, 10)])
        notes.copies(step, "long", saved=1)
    [long] = notes.of("long")
    assert (len(long.events), long.num_dropped) == (MAX_EVENTS, MAX_EVENTS + 1)
    assert len(notes._copies) == len(notes._saves_of_step) == 64


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("cmpl-1-0-abcd", ["cmpl-1-0-abcd"]),
        ("cmpl-1-0-abcd-p", ["cmpl-1-0-abcd-p"]),
        ("cmpl-2-0", ["0_cmpl-2-0-abcd", "1_cmpl-2-0-abcd"]),
        ("cmpl-2", []),
    ],
)
def test_the_sequences_that_vllm_makes_of_a_request_are_found_together(
    name: str, found: list[str]
) -> None:
    notes = ConnectorNotes(Ticks())
    for known in ("cmpl-1-0-abcd-p", "cmpl-1-0-abcd", "0_cmpl-2-0-abcd", "1_cmpl-2-0-abcd"):
        notes.received(known, 10, False, None)
    assert [one.request_id for one in notes.of(name)] == found


# ---- both


class Core:
    """An engine's client that answers with what ``notes`` hold; None is no connector."""

    def __init__(self, notes: ConnectorNotes | None, dead: bool = False) -> None:
        self._notes, self._dead = notes, dead
        self.engine_core = self

    async def call_utility_async(self, method: str, names: list[str]) -> object:
        if self._dead:
            raise compat.EngineDeadError
        assert method == "banaserve_notes"
        connector = SimpleNamespace(notes_of=self._notes.answer) if self._notes else None
        transfer = SimpleNamespace(kv_connector="StoreConnector")
        config = SimpleNamespace(kv_transfer_config=transfer)
        core = SimpleNamespace(scheduler=SimpleNamespace(connector=connector, vllm_config=config))
        return msgspec.msgpack.decode(msgspec.msgpack.encode(compat._notes(core, names)))


def traced() -> tuple[RequestNotes, ConnectorNotes, ConnectorNotes]:
    """A request over p0 and d0, all on one clock."""
    clock = Ticks()
    prefill, decode = ConnectorNotes(clock), ConnectorNotes(clock)
    seen = InstanceView(InstanceId("p0"), Role.PREFILL, True, None, 1, 7, 1.0)
    view = ClusterView(0.0, {seen.id: seen})
    with RequestLog(clock).following("r", 100, HttpCall(clock.now(), 0.0)) as notes:
        notes.note(SeenRoute("LoadAware", Route("p0", "d0", "two_legs"), None, view))
        notes.note(LegBegan("prefill", "p0", "r-1-p"), "r-1-p", 1)
        prefill.received("r-1-p", 100, True, None)
        prefill.finished("r-1-p", 1)
        notes.note(LegBegan("decode", "d0", "r-1"), "r-1", 1)
        decode.received("r-1", 100, False, 100)
        notes.note(FirstToken("prefill"))
        notes.tokens_so_far, notes.finish_reason = (lambda: 3), "length"
    return notes, prefill, decode


async def trace_of(notes: RequestNotes, instances: dict[Any, Any], *moves: Any) -> RequestTrace:
    return await TraceCollector(instances, notes._clock, lambda: moves).trace_of(notes)


def live(core: Core | None, incarnation: int = 1) -> Any:
    return SimpleNamespace(llm=core, incarnation=incarnation)


async def test_a_trace_has_the_events_of_all_processes_in_the_order_of_time() -> None:
    notes, prefill, decode = traced()
    found = await trace_of(notes, {"p0": live(Core(prefill)), "d0": live(Core(decode))})
    assert [(line.process, type(line.event)) for line in found.lines] == [
        ("front door", Routed),
        ("front door", LegBegan),
        ("p0", EngineReceived),
        ("p0", EngineFinished),
        ("front door", LegBegan),
        ("d0", EngineReceived),
        ("front door", FirstToken),
        ("front door", RequestEnded),
    ]
    assert [line.at_s for line in found.lines] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert found.missing == []
    routed = found.lines[0].event
    assert isinstance(routed, Routed)
    assert routed.candidates == [RouteCandidate("p0", "prefill", 1, 7)]
    assert msgspec.json.decode(msgspec.json.encode(found), type=RequestTrace) == found


@pytest.mark.parametrize(
    ("instances", "missing"),
    [
        ({}, "d0 has been removed, and its notes with it"),
        ({"d0": live(None)}, "d0 is down, and its notes with it"),
        (
            {"d0": live(Core(None, dead=True))},
            "d0 is down, and its notes with it",
        ),
        ({"d0": live(Core(None))}, "d0 runs without a store, and so without notes"),
        ({"d0": live(Core(None), 2)}, "d0 was started again since, and its notes are lost"),
        (
            {"d0": live(Core(ConnectorNotes(Ticks())))},
            "d0 does not know it: it keeps its last 1000 requests",
        ),
    ],
)
async def test_a_trace_says_whose_notes_are_not_there(
    instances: dict[str, Any], missing: str
) -> None:
    notes, prefill, _ = traced()
    found = await trace_of(notes, {"p0": live(Core(prefill)), **instances})
    assert found.missing == [missing]
    assert {line.process for line in found.lines} == {"front door", "p0"}


async def test_a_trace_says_whose_notes_break_their_contract() -> None:
    async def utility(method: str, names: list[str]) -> object:
        return {"type": "Answered", "value": [{"request_id": names[0]}]}

    notes, prefill, _ = traced()
    d0: Any = SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=utility))
    found = await trace_of(notes, {"p0": live(Core(prefill)), "d0": live(d0)})
    (missing,) = found.missing
    assert missing.startswith("d0: banaserve_notes has a reply that breaks its contract: ")
    assert {line.process for line in found.lines} == {"front door", "p0"}


WORDS: list[tuple[RequestEvent, str]] = [
    (Prepared(), "body read, rendered and tokenised"),
    (
        MoveCommitted("d0", "m1", "layers 2 to 4", "p0", 0.0125),
        "layers 2 to 4 of d0 moved to p0; its steps stood still for 12.5 ms",
    ),
    (
        MoveCommitted("d0", "m2", "layers 2 to 4", None, 0.001),
        "layers 2 to 4 of d0 moved to home; its steps stood still for 1.0 ms",
    ),
    (LookedUp(256, 0.0021), "store asked for the router: 256 tokens cached; took 2.1 ms"),
    (
        NoInstance("none is ready"),
        "waits for an instance: none is ready",
    ),
    (
        Routed("Rule", "p0", "d0", "two_legs", None, [RouteCandidate("p0", "prefill", 1, 40)]),
        "routed to p0 then d0 by Rule (two_legs); p0 (prefill) had 1 leg, 40 prompt tokens ahead",
    ),
    (
        Routed("LoadAware", None, "d0", "short_prompt", "prompt_logprobs"),
        "routed to d0 by LoadAware (short_prompt, it cannot be split: prompt_logprobs)",
    ),
    (LegBegan("prefill", "p0", "cmpl-1-p"), "prefill leg sent to p0 as cmpl-1-p"),
    (
        LegBegan("decode", "d1", "cmpl-1", 5),
        "decode leg sent to d1 as cmpl-1; goes on after 5 output tokens",
    ),
    (LegOutput("decode", "d0"), "decode leg: first output of d0's own"),
    (
        LegEnded("prefill", "p0", "length", 128),
        "prefill leg ended on p0: length; 128 prompt tokens cached",
    ),
    (LegEnded("decode", "d0", "stop"), "decode leg ended on d0: stop"),
    (
        LegFailed("prefill", "p0", "EngineDeadError", 1, "tried again"),
        "prefill leg failed on p0: EngineDeadError; tried again",
    ),
    (FirstToken("prefill"), "first token of the answer, from prefill"),
    (
        FirstToken("decode", "sampling"),
        "first token of the answer, from decode; prefill's could not be used: sampling",
    ),
    (RequestEnded("length", 1), "request ended: length, 1 output token"),
    (RequestEnded("error", 0, "no time"), "request ended: error, 0 output tokens; no time"),
    (
        EngineReceived(300, True, None),
        "scheduler has it: 300 prompt tokens; prefill leg, all of its KV is to be saved",
    ),
    (
        EngineReceived(300, False, 300),
        "scheduler has it: 300 prompt tokens; hand-over: 300 tokens lie in the store",
    ),
    (
        StoreAsked(3, 2, 1, 1, True, 0.0005),
        "store asked: 2 of 3 blocks found, 1 readable; 1 block reserved for saving; took 0.5 ms; "
        "a tier could not say yet",
    ),
    (
        PromotionEnded("late", 2, 1, 0.25, 0.01),
        "waited 250.0 ms for a tier: late, 1 of 2 blocks; 10.0 ms predicted",
    ),
    (
        GateDecided("fetch", 2, 2, 256, 0.001, 0.2, 0.05),
        "cost gate: fetch 2 blocks, 256 tokens (fetch); predicted 1.0 ms against 200.0 ms; "
        "step of 50.0 ms",
    ),
    (
        GateDecided("cut", 3, 8, 1024, 0.9, 1.2, 0.7),
        "cost gate: fetch 3 of 8 blocks, 1024 tokens (cut); predicted 900.0 ms against "
        "1200.0 ms; step of 700.0 ms",
    ),
    (
        GateDecided("compute", 0, 1, 16, None, None, None),
        "cost gate: compute 1 block, 16 tokens (compute)",
    ),
    (
        StepsPlanned("prompt", 4, 4, 1, 300, 0.0, 0.0, 1, 3),
        "prompt: step 4, 300 tokens; fetches 1 block; saves 3 blocks",
    ),
    (
        StepsPlanned("decode", 5, 9, 4, 4, 0.08, 0.031, 0, 0),
        "decode: 4 steps from 5 to 9, 4 tokens; over 80.0 ms, at most 31.0 ms apart",
    ),
    (
        CopiesEnded(4, 1, 3, 0.002, 0.1, 2),
        "step 4 ended, computed in 100.0 ms; 1 block fetched in 2.0 ms; "
        "3 blocks saved to the store; 2 blocks of the step not saved",
    ),
    (CopiesEnded(4, 0, 1, 0.0, None, 0), "step 4 ended; 1 block saved to the store"),
    (EngineFinished(2), "scheduler lets it go: 2 output tokens"),
]


@pytest.mark.parametrize(("event", "words"), WORDS, ids=lambda value: type(value).__name__)
def test_every_event_in_words(event: RequestEvent, words: str) -> None:
    assert "; ".join(parts_of(event)) == words


def test_every_kind_of_event_has_its_words() -> None:
    assert {type(event) for event, _ in WORDS} == set(RequestEvent.__args__)


def test_a_request_in_a_line_and_a_row() -> None:
    one = RequestSummary("cmpl-1", 0.0, 300, 256, 4, ["p0", "d0"], 0.05, 0.2, "length")
    assert heading(one).endswith(
        "300 prompt tokens, 4 output tokens, first after 50.0 ms, length after 200.0 ms"
    )
    assert list_rows([one])[1][2:] == ("300", "4", "p0, d0", "50.0 ms", "200.0 ms", "length")
    one = RequestSummary("cmpl-2", 0.0, 1, 0, 0, [], None, 0.2, "")
    assert heading(one).endswith("1 prompt token, 0 output tokens, under way")
    assert list_rows([one])[1][2:] == ("1", "0", "-", "-", "200.0 ms", "under way")


async def test_the_rows_of_a_trace_stand_in_line() -> None:
    notes, prefill, decode = traced()
    found = await trace_of(notes, {"p0": live(Core(prefill)), "d0": live(Core(decode))})
    rows = trace_rows(found)
    assert {len(row[0]) for row in rows[1:]} == {len("9000.0")}
    assert rows[3][:2] == ("3000.0", "p0")


def test_notes_let_go_of_what_counts_when_a_request_ends() -> None:
    """They are kept for a thousand requests more: a detokenizer holds a whole tokenizer."""

    class Detokenizer:
        num_tokens = 7

    detokenizer = Detokenizer()
    gone = weakref.ref(detokenizer)
    log = RequestLog(Ticks())
    with log.following("r", 3, HttpCall(0.0, 0.0)) as notes:
        notes.tokens_so_far = lambda one=detokenizer: one.num_tokens  # type: ignore[misc]
        detokenizer.num_tokens = 9
        assert notes.count_output() == 9
    del detokenizer
    assert gone() is None
    assert notes.tokens_so_far() == 9
