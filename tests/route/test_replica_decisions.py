"""Hand-written decisions of the policies over replicas: what each looks at and what it does not."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from banaserve.base.types import RequestId
from banaserve_route.policies.fleet import Fleet
from banaserve_route.policies.interface import ReplicaId, ReplicaView, Request, RoutingReason
from banaserve_route.policies.registry import make
from banaserve_route.policies.ring import Ring
from fleets import Views, fleet_of


def ask(fleet: Fleet, **what: Any) -> tuple[str | None, RoutingReason]:
    given: dict[str, Any] = {"id": RequestId("r"), "num_tokens": 100, **what}
    decision = fleet.choose(Request(**given), 10.0)
    return decision.target, decision.reason


BUSY = {"outstanding": 5}
IDLE = {"outstanding": 1}


@pytest.mark.parametrize(
    ("name", "section", "views", "target", "reason"),
    [
        ("least_requests", {}, {"a": BUSY, "b": IDLE}, "b", RoutingReason.LEAST_LOADED),
        (
            "least_requests",
            {},
            {"a": IDLE | {"running": 40}, "b": BUSY},
            "a",
            RoutingReason.LEAST_LOADED,
        ),
        (
            "least_requests",
            {"preset": "as-coded"},
            {"a": IDLE | {"running": 40}, "b": BUSY},
            "b",
            RoutingReason.LEAST_LOADED,
        ),
        # 200 requests with nothing to compute against one with a long prompt.
        (
            "least_load",
            {},
            {"a": {"outstanding": 200}, "b": {"outstanding": 1, "uncached_tokens": 9000}},
            "a",
            RoutingReason.LEAST_LOADED,
        ),
        # 1000 tokens at 0.1 ms are 100 ms, 300 output tokens at 0.5 ms are 150 ms.
        (
            "least_load",
            {"prefill_ms_per_token": 0.1, "output_ms_per_token": 0.5},
            {"a": {"uncached_tokens": 1000}, "b": {"output_tokens": 300}},
            "a",
            RoutingReason.LEAST_LOADED,
        ),
        # As coded a fifth of the KV memory outweighs any queue.
        (
            "least_load",
            {"preset": "as-coded"},
            {"a": {"pending": 500, "outstanding_tokens": 20_000}, "b": {"kv_used_fraction": 0.2}},
            "a",
            RoutingReason.LEAST_LOADED,
        ),
        ("power_of_two", {}, {"a": BUSY, "b": IDLE}, "b", RoutingReason.LEAST_LOADED),
        ("power_of_two", {}, {"a": BUSY}, "a", RoutingReason.ONLY_CHOICE),
        ("round_robin", {}, {"a": BUSY, "b": IDLE}, "a", RoutingReason.TURN),
        ("session_affinity", {}, {"a": BUSY, "b": IDLE}, "b", RoutingReason.LEAST_LOADED),
    ],
)
def test_decision_on_counters(name, section, views, target, reason):
    assert ask(fleet_of(name, views, **section)) == (target, reason)


@pytest.mark.parametrize(
    ("views", "request_", "reason"),
    [
        ({}, {}, RoutingReason.NONE_MAY),
        ({"a": {"is_available": False}}, {}, RoutingReason.NONE_AVAILABLE),
        ({"a": {"region": "us"}}, {"allowed_regions": frozenset({"eu"})}, RoutingReason.NONE_MAY),
        ({"a": {"models": frozenset({"m"})}}, {"model": "n"}, RoutingReason.NONE_MAY),
        ({"a": {"max_prompt_tokens": 99}}, {}, RoutingReason.NONE_MAY),
        (
            {"a": {"region": "us"}, "b": {"region": "eu", "is_available": False}},
            {"allowed_regions": frozenset({"eu"})},
            RoutingReason.NONE_AVAILABLE,
        ),
    ],
)
def test_a_request_that_nobody_takes_is_held_with_the_reason(views, request_, reason):
    assert ask(fleet_of("random", views), **request_) == (None, reason)


def test_least_load_tells_its_scores():
    fleet = fleet_of("least_load", {"a": {"uncached_tokens": 1000}, "b": {"output_tokens": 10}})
    decision = fleet.choose(Request(RequestId("r"), 1), 0.0)
    assert decision.scores_ms == pytest.approx({"a": 94.0, "b": 5.0})


def sequence(fleet: Fleet, sessions: list[str]) -> str:
    """Returns the targets of one request a session, each staying outstanding."""
    targets = ""
    for number, session in enumerate(sessions):
        request = Request(RequestId(str(number)), 10, session=session)
        decision = fleet.choose(request, float(number))
        fleet.sent(request, decision, float(number))
        targets += decision.target or "-"
    return targets


def test_round_robin_goes_on_where_it_was_when_one_comes_back():
    fleet = fleet_of("round_robin", {"a": {}, "b": {}, "c": {}})
    assert sequence(fleet, [""] * 4) == "abca"
    fleet.set_available(ReplicaId("b"), False)
    assert sequence(fleet, [""] * 3) == "cac"
    fleet.set_available(ReplicaId("b"), True)
    assert sequence(fleet, [""] * 4) == "bacb"


def test_a_session_stays_until_its_replica_dies_and_keeps_its_new_home():
    fleet = fleet_of("session_affinity", {"a": {}, "b": {"outstanding": 1}})
    assert sequence(fleet, ["x", "x", "x"]) == "aaa"
    assert sequence(fleet, ["y"]) == "b"
    fleet.set_available(ReplicaId("a"), False)
    assert sequence(fleet, ["x"]) == "b"
    fleet.set_available(ReplicaId("a"), True)
    assert sequence(fleet, ["x", "y"]) == "bb"


def test_sessions_beyond_the_bound_are_forgotten_oldest_first():
    fleet = fleet_of("session_affinity", {"a": {}, "b": {"outstanding": 9}}, max_sessions=2)
    assert sequence(fleet, ["x", "y", "z"]) == "aaa"
    fleet.set_available(ReplicaId("a"), False)
    assert sequence(fleet, ["w"]) == "b"
    fleet.set_available(ReplicaId("a"), True)
    # y went out for w; x went out before, is seen as new, and goes where least is outstanding.
    assert ask(fleet, session="z") == ("a", RoutingReason.SESSION)
    assert ask(fleet, session="x") == ("a", RoutingReason.LEAST_LOADED)
    assert ask(fleet, session="w") == ("b", RoutingReason.SESSION)


def test_modulo_moves_most_sessions_when_a_replica_dies_and_the_ring_only_its_own():
    views: Views = {f"r{number}": {} for number in range(8)}
    moved = {}
    for name, section in (
        ("session_affinity", {"preset": "as-coded"}),
        ("consistent_hash", {"preset": "as-coded"}),
        ("consistent_hash", {"max_load_factor": 0}),
    ):
        fleet = fleet_of(name, views, **section)
        sessions = [f"s{number}" for number in range(300)]
        before = {session: ask(fleet, session=session)[0] for session in sessions}
        fleet.set_available(ReplicaId("r3"), False)
        after = {session: ask(fleet, session=session)[0] for session in sessions}
        lost = [session for session in sessions if before[session] == "r3"]
        others = [session for session in sessions if before[session] != "r3"]
        moved[name] = sum(before[session] != after[session] for session in others)
        assert lost
        assert "r3" not in after.values()
    assert moved["consistent_hash"] == 0
    assert moved["session_affinity"] > 150


def test_the_ring_spreads_keys_and_a_full_replica_spills_to_the_next():
    ring = Ring(64).over([ReplicaId(f"r{number}") for number in range(8)])
    everyone = {ReplicaId(f"r{number}") for number in range(8)}
    owners = Counter(ring.find(str(key).encode(), everyone) for key in range(8000))
    assert set(owners) == everyone
    # Of 64 places each a share has a standard deviation of an eighth: four of them.
    assert max(owners.values()) < 1.5 * 1000
    assert ring.find(b"key", set()) is None

    fleet = fleet_of("consistent_hash", {f"r{number}": {} for number in range(4)})
    counts = Counter(sequence(fleet, ["popular"] * 40).split("r"))
    assert max(counts.values()) <= 1.25 * 10 + 1


def test_without_a_session_the_start_of_the_prompt_stands_for_it():
    fleet = fleet_of("consistent_hash", {f"r{number}": {} for number in range(8)})
    start = b"system prompt " * 30
    assert len({ask(fleet, prompt=start + bytes([tail]) * 50)[0] for tail in range(20)}) == 1
    assert len({ask(fleet, prompt=bytes([head]) + start)[0] for head in range(40)}) > 4


def test_power_of_two_never_takes_the_most_loaded():
    fleet = fleet_of("power_of_two", {"a": {"outstanding": 9}, "b": {}, "c": {}})
    targets = Counter(ask(fleet)[0] for _ in range(200))
    assert targets["a"] == 0
    assert min(targets["b"], targets["c"]) > 50


def test_equals_are_drawn_at_random():
    fleet = fleet_of("least_requests", {name: {} for name in "abcd"})
    assert min(Counter(ask(fleet)[0] for _ in range(400)).values()) > 60


def test_stale_counters_send_a_burst_to_one_replica_and_live_ones_do_not():
    def burst(staleness_s: float) -> int:
        fleet = Fleet(make("least_requests", Random(1)), "us", staleness_s)
        fleet.add(ReplicaView(ReplicaId("a")))
        fleet.add(ReplicaView(ReplicaId("b"), outstanding=4))
        for number in range(8):
            request = Request(RequestId(str(number)), 10)
            fleet.sent(request, fleet.choose(request, 0.0), 0.0)
        live = fleet.get(ReplicaId("a"))
        assert live is not None
        return live.outstanding

    assert burst(30.0) == 8
    assert burst(0.0) == 6
