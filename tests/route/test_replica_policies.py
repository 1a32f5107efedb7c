"""What holds for every policy over replicas, whatever it is asked and told."""

from __future__ import annotations

import sys
from collections import Counter, deque
from copy import deepcopy
from random import Random
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banaserve.base.errors import UserError
from banaserve.base.types import RequestId
from banaserve_route.policies.fleet import Fleet, Report
from banaserve_route.policies.interface import (
    HELD,
    Flight,
    PeerView,
    ReplicaId,
    ReplicaPolicy,
    ReplicaView,
    Request,
    RoutingDecision,
    RoutingReason,
)
from banaserve_route.policies.policy import may_serve
from banaserve_route.policies.registry import make, names, presets
from depth import num_examples

ALL = [(name, preset) for name in names() for preset in presets(name)]
every_policy = pytest.mark.parametrize(("name", "preset"), ALL)

REGIONS = ("us", "eu", "asia")
PROMPTS = [
    b"",
    b"you are helpful. " * 20,
    b"you are helpful. " * 20 + b"what is a tree?",
    b"you are helpful. " * 20 + b"what is a graph? " * 9,
    b"translate: " + b"x" * 400,
    bytes(range(256)) * 3,
]

requests = st.builds(
    Request,
    id=st.just(RequestId("r")),
    num_tokens=st.integers(1, 5000),
    prompt=st.sampled_from(PROMPTS),
    expected_output_tokens=st.integers(0, 500),
    session=st.sampled_from(["", "ann", "bob", "eve"]),
    model=st.sampled_from(["", "", "m1", "m2"]),
    allowed_regions=st.none() | st.frozensets(st.sampled_from(REGIONS), max_size=2),
    was_forwarded=st.booleans(),
)
replicas = st.builds(
    ReplicaView,
    id=st.integers(0, 9).map(lambda n: ReplicaId(f"r{n}")),
    region=st.sampled_from(REGIONS),
    models=st.sampled_from([frozenset(), frozenset({"m1"})]),
    max_prompt_tokens=st.sampled_from([0, 0, 3000]),
    is_available=st.booleans(),
    round_trip_ms=st.floats(0, 300),
)
peers = st.builds(
    PeerView,
    id=st.integers(0, 3).map(lambda n: ReplicaId(f"p{n}")),
    region=st.sampled_from(REGIONS),
    is_available=st.booleans(),
    round_trip_ms=st.floats(0, 300),
    queue_length=st.integers(0, 20),
    num_available=st.integers(0, 3),
)
reports = st.builds(
    Report,
    at_s=st.just(0.0),
    pending=st.integers(0, 3),
    running=st.integers(0, 60),
    kv_used_fraction=st.floats(0, 1),
    queue_length=st.integers(0, 20),
    num_available=st.integers(0, 3),
)
events = st.one_of(
    st.tuples(st.just("ask"), requests),
    st.tuples(st.just("ask"), requests),
    st.tuples(st.just("first"), st.integers(0, 99)),
    st.tuples(st.just("finish"), st.integers(0, 99)),
    st.tuples(st.just("fail"), st.integers(0, 99)),
    st.tuples(st.just("report"), st.tuples(st.integers(0, 99), reports)),
    st.tuples(st.just("flip"), st.integers(0, 99)),
    st.tuples(st.just("restart"), st.integers(0, 99)),
    st.tuples(st.just("leave"), st.integers(0, 99)),
    st.tuples(st.just("queue"), st.integers(0, 30)),
    st.tuples(st.just("tick"), st.integers(0, 300)),
)


class World:
    """A fleet that events happen to; checks each decision."""

    def __init__(self, name: str, preset: str, views: list[ReplicaView], staleness_s: float):
        self.policy = make(name, Random(5), preset=preset)
        self.fleet = Fleet(self.policy, "us", staleness_s)
        self.views: dict[ReplicaId, ReplicaView] = {}
        for view in views:
            if view.id not in self.views:
                self.views[view.id] = view
                self.fleet.add(view)
        self.flights: list[Flight] = []
        self.decisions: list[RoutingDecision] = []
        self.now_s = 100.0

    def happen(self, event: tuple[str, object]) -> None:
        kind, what = event
        self.now_s += 0.05
        getattr(self, kind)(what)
        self.fleet.check()

    def ask(self, request: Request) -> None:
        decision = self.fleet.choose(request, self.now_s)
        self.decisions.append(decision)
        if decision.target is None:
            assert decision.reason in HELD
            assert not decision.scores_ms or decision.reason is RoutingReason.ALL_BUSY
            if decision.reason is not RoutingReason.ALL_BUSY:
                assert not self.left_to(request)
            return
        assert decision.reason not in HELD
        target = self.views[decision.target]
        assert target.is_available
        assert may_serve(target, request)
        assert not (request.was_forwarded and isinstance(target, PeerView))
        assert 0 <= decision.hit_tokens <= request.num_tokens
        self.flights.append(self.fleet.sent(request, decision, self.now_s))

    def left_to(self, request: Request) -> list[ReplicaView]:
        return [
            view
            for view in self.views.values()
            if view.is_available and may_serve(view, request) and not isinstance(view, PeerView)
        ]

    def first(self, number: int) -> None:
        if self.flights:
            self.fleet.first_token(self.flights[number % len(self.flights)], self.now_s)

    def finish(self, number: int) -> None:
        if self.flights:
            flight = self.flights.pop(number % len(self.flights))
            self.fleet.finished(flight, self.now_s, 10, cached_tokens=number)

    def fail(self, number: int) -> None:
        if self.flights:
            self.fleet.failed(self.flights.pop(number % len(self.flights)), self.now_s)

    def report(self, what: tuple[int, Report]) -> None:
        number, report = what
        if (target := self.at(number)) is not None:
            self.fleet.reported(target, Report(self.now_s, *_after_time(report)))

    def flip(self, number: int) -> None:
        if (target := self.at(number)) is not None:
            self.fleet.set_available(target, not self.views[target].is_available)

    def restart(self, number: int) -> None:
        if (target := self.at(number)) is not None:
            self.fleet.restarted(target)

    def leave(self, number: int) -> None:
        if number % 5 == 0 and (target := self.at(number)) is not None:
            del self.views[target]
            self.fleet.remove(target)

    def queue(self, number: int) -> None:
        self.fleet.queue_length = number

    def tick(self, seconds: int) -> None:
        self.now_s += seconds
        self.policy.tick(self.now_s)

    def at(self, number: int) -> ReplicaId | None:
        ids = sorted(self.views)
        return ids[number % len(ids)] if ids else None


def _after_time(report: Report) -> tuple[int, int, float, int, int]:
    return (
        report.pending,
        report.running,
        report.kv_used_fraction,
        report.queue_length,
        report.num_available,
    )


@every_policy
@settings(max_examples=num_examples(12))
@given(
    views=st.lists(replicas | replicas | peers, max_size=8),
    happening=st.lists(events, max_size=40),
    staleness_s=st.sampled_from([0.0, 0.5]),
)
def test_a_target_is_allowed_and_available_and_a_twin_chooses_the_same(
    name, preset, views, happening, staleness_s
):
    twins = [World(name, preset, deepcopy(views), staleness_s) for _ in range(2)]
    for event in happening:
        for world in twins:
            world.happen(event)
    assert twins[0].decisions == twins[1].decisions


def _serve(fleet: Fleet, request: Request, now_s: float) -> RoutingDecision:
    """One request alone, from its decision to its end."""
    decision = fleet.choose(request, now_s)
    if decision.target is not None:
        flight = fleet.sent(request, decision, now_s)
        fleet.first_token(flight, now_s + 0.1)
        fleet.finished(flight, now_s + 0.5, 10)
    return decision


@every_policy
def test_no_replica_starves_under_load_of_different_prompts(name, preset):
    fleet = Fleet(make(name, Random(3), preset=preset))
    for number in range(6):
        fleet.add(ReplicaView(ReplicaId(f"r{number}")))
    rng = Random(11)
    served: Counter[ReplicaId] = Counter()
    flights: deque[Flight] = deque()
    for number in range(900):
        now_s = number * 0.02
        request = Request(
            RequestId(str(number)), 400, rng.randbytes(400), 50, session=f"s{rng.random()}"
        )
        if len(flights) >= 24:
            fleet.finished(flights.popleft(), now_s, 50)
        decision = fleet.choose(request, now_s)
        assert decision.target is not None, decision
        served[decision.target] += 1
        flights.append(fleet.sent(request, decision, now_s))
        if number % 5 == 0:
            for view in fleet.view(now_s).replicas:
                fleet.reported(view.id, Report(now_s, 0, view.outstanding, 0.1))
            fleet.policy.tick(now_s)
    assert len(served) == 6, served
    assert min(served.values()) > 30, served


@every_policy
def test_a_replica_that_was_away_is_used_again(name, preset):
    fleet = Fleet(make(name, Random(3), preset=preset))
    for name_of in ("a", "b"):
        fleet.add(ReplicaView(ReplicaId(name_of)))
    rng = Random(2)

    def targets(start: int) -> set[ReplicaId | None]:
        flights: deque[Flight] = deque()
        chosen = set()
        for number in range(start, start + 60):
            if len(flights) == 4:
                fleet.finished(flights.popleft(), float(number), 10)
            request = Request(RequestId(str(number)), 300, rng.randbytes(300), 10, str(number))
            decision = fleet.choose(request, float(number))
            chosen.add(decision.target)
            flights.append(fleet.sent(request, decision, float(number)))
        for flight in flights:
            fleet.finished(flight, start + 60.0, 10)
        return chosen

    assert targets(0) == {"a", "b"}
    fleet.set_available(ReplicaId("a"), False)
    fleet.restarted(ReplicaId("a"))
    assert targets(100) == {"b"}
    fleet.set_available(ReplicaId("a"), True)
    assert "a" in targets(200)


SMALL = {
    "cache_aware": {"max_tree_bytes": 1 << 16},
    "gorgo": {"max_tree_bytes": 1 << 16},
    "gorgo_v1": {"max_tree_bytes": 1 << 16},
    "gorgo_v2": {"max_tree_bytes": 1 << 16},
    "preble": {"capacity_tokens": 10_000, "window_s": 60},
    "prefix_cache": {"max_blocks": 400},
    "session_affinity": {"max_sessions": 500},
    "skywalker": {"max_tree_bytes": 1 << 16},
}
"""Bounds that a short test reaches."""


@every_policy
def test_memory_stays_bounded(name, preset):
    policy = make(name, Random(3), preset=preset, **SMALL.get(name, {}))
    fleet = Fleet(policy)
    for number in range(3):
        fleet.add(ReplicaView(ReplicaId(f"r{number}")))
    rng = Random(4)

    def serve(start: int, count: int) -> int:
        for number in range(start, start + count):
            prompt = rng.randbytes(200)
            request = Request(RequestId(str(number)), 50, prompt, 5, session=str(number))
            _serve(fleet, request, number * 0.3)
            if number % 3 == 0:
                policy.tick(number * 0.3)
        return size_of(policy)

    first = serve(0, 700)
    second = serve(700, 700)
    assert second <= first * 1.25 + 20_000, (first, second)


def size_of(policy: ReplicaPolicy) -> int:
    """Bytes of everything that ``policy`` alone refers to, native parts by their own count."""
    seen: set[int] = set()
    total = 0
    waiting: list[object] = [policy]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | ModuleType) or callable(one):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if type(one).__name__ == "PrefixTree" and hasattr(one, "num_bytes"):
            total += one.num_bytes
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset | deque):
            waiting += list(one)
        else:
            waiting += list(getattr(one, "__dict__", {}).values())
            slots = [slot for cls in type(one).__mro__ for slot in getattr(cls, "__slots__", ())]
            waiting += [getattr(one, slot) for slot in slots if hasattr(one, slot)]
    return total


@every_policy
def test_what_a_policy_remembers_survives_a_restart(name, preset):
    fleet = Fleet(make(name, Random(3), preset=preset))
    for number in range(3):
        fleet.add(ReplicaView(ReplicaId(f"r{number}"), round_trip_ms=number * 20.0))
    for number in range(300):
        _serve(fleet, Request(RequestId(str(number)), 100 + number, b"p" * number), number * 1.0)
    state = fleet.policy.state()
    twin = make(name, Random(4), preset=preset)
    twin.restore(state)
    assert twin.state() == state
    with pytest.raises(UserError):
        make(name, Random(4), preset=preset).restore({"nonsense": 1})


def test_round_trips_are_smoothed_and_nonsense_is_dropped():
    fleet = Fleet(make("round_robin", Random(0)))
    view = ReplicaView(ReplicaId("a"))
    fleet.add(view)
    for milliseconds in (100.0, 200.0, float("nan"), -5.0, float("inf")):
        fleet.measured_round_trip(view.id, milliseconds)
    assert view.round_trip_ms == pytest.approx(130.0)


def test_an_older_report_is_dropped_and_a_name_is_taken_once():
    fleet = Fleet(make("round_robin", Random(0)))
    view = ReplicaView(ReplicaId("a"))
    fleet.add(view)
    fleet.reported(view.id, Report(5.0, pending=2))
    fleet.reported(view.id, Report(4.0, pending=9))
    assert view.pending == 2
    with pytest.raises(UserError, match="two replicas are called a"):
        fleet.add(PeerView(ReplicaId("a")))


def test_counters_of_a_replica_that_left_do_not_touch_its_successor():
    fleet = Fleet(make("round_robin", Random(0)))
    fleet.add(ReplicaView(ReplicaId("a")))
    request = Request(RequestId("1"), 10)
    flight = fleet.sent(request, fleet.choose(request, 0.0), 0.0)
    fleet.remove(ReplicaId("a"))
    successor = ReplicaView(ReplicaId("a"))
    fleet.add(successor)
    fleet.failed(flight, 1.0)
    fleet.failed(flight, 2.0)
    assert (successor.outstanding, successor.uncached_tokens) == (0, 0)
    fleet.check()


@pytest.mark.parametrize(
    ("name", "section", "words"),
    [
        ("roundrobin", {}, "did you mean round_robin"),
        ("least_load", {"preset": "best"}, "unknown preset of policy least_load"),
        ("least_load", {"prefill_ms": 3}, "did you mean prefill_ms_per_token"),
        ("least_load", {"prefill_ms_per_token": -1}, "prefill_ms_per_token is -1"),
        ("least_load", {"prefill_ms_per_token": "fast"}, "takes a number: got 'fast'"),
        ("consistent_hash", {"max_load_factor": 0.5}, "give 1 to"),
        ("round_robin", {"unit_bytes": 3}, "unit_bytes is 3"),
    ],
)
def test_bad_options_are_named(name, section, words):
    with pytest.raises(UserError, match=words):
        make(name, Random(0), **section)
