"""The default policy: what it learns, and what it does with it."""

from __future__ import annotations

from random import Random

import pytest

from banaserve._native import Line, request_costs
from banaserve.base.types import RequestId
from banaserve_route.policies.fleet import Fleet, Report
from banaserve_route.policies.interface import Flight, ReplicaId, Request, RoutingReason
from banaserve_route.policies.predicted_latency import PredictedLatency
from fleets import Views, fleet_of

LONG, OTHER = "x" * 4000, "y" * 4000


def ask(prompt: str) -> Request:
    return Request(RequestId("r"), len(prompt), prompt.encode())


def serve(
    fleet: Fleet, prompt: str, ms_per_token: float, cached: int | None = None, at_s: float = 0.0
) -> Flight:
    """Serve ``prompt`` where the policy sends it, in the time of its tokens that are not cached."""
    flight = fleet.sent(ask(prompt), fleet.choose(ask(prompt), at_s), at_s)
    missed = len(prompt) - (flight.decision.hit_tokens if cached is None else cached)
    first_s = at_s + ms_per_token * missed / 1000
    fleet.first_token(flight, first_s)
    fleet.finished(flight, first_s + 1.0, 11, cached)
    return flight


def policy_of(fleet: Fleet) -> PredictedLatency:
    assert isinstance(fleet.policy, PredictedLatency)
    return fleet.policy


def test_a_line_forgets_and_is_never_negative() -> None:
    line, rng = Line(0.5, 10.0), Random(1)
    for _ in range(500):
        x = 100 * rng.random()
        line.learn(x, 20 + 3 * x)
    assert (line.base, line.slope) == (pytest.approx(20, abs=1), pytest.approx(3, rel=0.02))
    for _ in range(1500):
        x = 100 * rng.random()
        line.learn(x, 50 - 0.1 * x)
    assert line.slope == 0
    assert 40 < line.base < 50


def test_there_are_no_costs_without_a_replica() -> None:
    with pytest.raises(ValueError, match="views is empty"):
        request_costs([], {}, {}, {}, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 16.0, 0.0)


def test_a_prompt_goes_back_to_its_prefix_until_waiting_there_costs_more() -> None:
    fleet = fleet_of("predicted_latency", {"a": {}, "b": {}})
    home = serve(fleet, LONG, 0.05).target
    assert fleet.choose(ask(LONG), 0.0).target == home
    for _ in range(3):
        fleet.sent(ask(OTHER), fleet.choose(ask(OTHER), 0.0), 0.0)
    busy = fleet.get(home)
    assert busy is not None
    busy.uncached_tokens += 100_000
    decision = fleet.choose(ask(LONG), 0.0)
    assert decision.target != home
    assert decision.reason is RoutingReason.LOWEST_COST
    assert decision.scores_ms[home] > min(decision.scores_ms.values())


def test_a_light_load_fills_all_caches() -> None:
    """Round trips differ by microseconds, and each chat begins with the same few tokens."""
    trips = {"a": 0.25, "b": 0.27, "c": 0.3}
    views = {name: {"round_trip_ms": milliseconds} for name, milliseconds in trips.items()}
    fleet = fleet_of("predicted_latency", views)
    begin = "You are a bot."
    targets = [serve(fleet, f"{begin}{n:04}" + "z" * 400, 0.05).target for n in range(300)]
    assert all(80 <= targets.count(ReplicaId(name)) <= 120 for name in trips)
    homes = {serve(fleet, f"{n:04}{LONG}", 0.05).target: f"{n:04}{LONG}" for n in range(20)}
    for _ in range(20):
        for home, prompt in homes.items():
            assert fleet.choose(ask(prompt), 0.0).target == home, "a long prefix is worth it"


def test_it_learns_what_a_token_takes() -> None:
    fleet, rng = fleet_of("predicted_latency", {"a": {}, "b": {}}), Random(2)
    for number in range(300):
        serve(fleet, f"{number}" + "z" * int(4000 * rng.random()), 0.3, at_s=10.0 * number)
    assert policy_of(fleet).first_token_ms.slope == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize(("fetch_ms", "low", "high"), [(0.01, 0.0, 0.4), (0.05, 0.9, 1.0)])
def test_it_learns_whether_replicas_share_what_they_hold(
    fetch_ms: float, low: float, high: float
) -> None:
    fleet = fleet_of("predicted_latency", {"a": {}, "b": {}})
    for number in range(200):
        prompt = f"{number:04}" * 1000
        home = serve(fleet, prompt, 0.05, cached=0, at_s=10.0 * number).target
        fleet.set_available(home, False)
        # The other replica has it from the store, or computes it.
        flight = fleet.sent(ask(prompt), fleet.choose(ask(prompt), 0.0), 0.0)
        fleet.first_token(flight, fetch_ms * 4)
        fleet.finished(flight, fetch_ms * 4 + 1, 11, 3999 if fetch_ms < 0.05 else 0)
        fleet.set_available(home, True)
    assert low <= policy_of(fleet).fetch_fraction <= high


def test_sessions_leave_a_replica_that_does_not_keep_them() -> None:
    fleet = fleet_of("predicted_latency", {"a": {}, "b": {}})
    prompts = [chr(ord("A") + n) * 4000 for n in range(30)]
    homes = {prompt: serve(fleet, prompt, 0.05).target for prompt in prompts}
    for turn in range(10):
        for prompt, home in homes.items():
            fleet.set_available(ReplicaId("b" if home == "a" else "a"), False)
            cached = 0 if home == "a" else len(prompt)
            serve(fleet, prompt, 0.05, cached, at_s=10.0 * turn)
            for name in ("a", "b"):
                fleet.set_available(ReplicaId(name), True)
    lost = next(prompt for prompt, home in homes.items() if home == "a")
    decision = fleet.choose(ask(lost), 0.0)
    assert decision.scores_ms["a"] > 0.5 * decision.scores_ms["b"], "little of it is there"
    kept = next(prompt for prompt, home in homes.items() if home == "b")
    assert fleet.choose(ask(kept), 0.0).target == "b"
    fleet.remove(ReplicaId("a"))
    assert ReplicaId("a") not in policy_of(fleet)._kept


def test_a_slow_replica_gets_less_and_is_tried_again() -> None:
    fleet, sent = fleet_of("predicted_latency", {"a": {}, "b": {}}), []
    for number in range(100):
        at_s = 10.0 * number
        request = ask(f"{number:04}" * 500)
        flight = fleet.sent(request, fleet.choose(request, at_s), at_s)
        fleet.first_token(flight, at_s + (1.0 if flight.target == "a" else 0.1))
        fleet.finished(flight, at_s + 2, 11)
        sent.append(flight.target)
    assert sent[20:].count(ReplicaId("a")) < 10
    for _ in range(200):
        fleet.policy.tick(0.0)
    request = ask("new" * 500)
    scores = fleet.choose(request, 0.0).scores_ms
    assert scores[ReplicaId("a")] == pytest.approx(scores[ReplicaId("b")], rel=0.05)


def test_of_many_replicas_the_holder_of_the_prefix_and_some_others_are_compared() -> None:
    views: Views = {f"r{number:02}": {} for number in range(64)}
    fleet = fleet_of("predicted_latency", views)
    homes = {serve(fleet, f"{n:04}" * 800, 0.05).target: f"{n:04}" * 800 for n in range(20)}
    for home, prompt in homes.items():
        decision = fleet.choose(ask(prompt), 0.0)
        assert decision.target == home
        assert len(decision.scores_ms) <= 8
    for name in views:
        fleet.set_available(ReplicaId(name), name == "r63")
    assert fleet.choose(ask("new"), 0.0).target == "r63"


@pytest.mark.parametrize(("pending", "target"), [(0, "p"), (90, "a")])
def test_a_peer_serves_if_the_distance_costs_less_than_waiting_here(
    pending: int, target: str
) -> None:
    fleet = fleet_of(
        "predicted_latency",
        {"a": {"uncached_tokens": 10_000, "outstanding": 3}},
        {"p": {"round_trip_ms": 100.0}},
    )
    available = 0 if pending else 2
    fleet.reported(ReplicaId("p"), Report(0.0, pending, 2, num_available=available, num_replicas=2))
    policy_of(fleet)
    assert fleet.choose(ask(LONG), 0.0).target == target
