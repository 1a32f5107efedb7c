"""GORGO: what it costs to go elsewhere, what tokens cost, and a tuner that is not fooled."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from banaserve.base.errors import UserError
from banaserve.base.types import RequestId
from banaserve_route.policies.fleet import Fleet
from banaserve_route.policies.gorgo.tuner import RANGES, SIGMA_FLOOR, START, CodedTuner
from banaserve_route.policies.interface import (
    PeerView,
    ReplicaId,
    ReplicaView,
    Request,
    RoutingDecision,
    RoutingReason,
)
from banaserve_route.policies.rates import Rates
from banaserve_route.policies.registry import make

A, B, P, Q = (ReplicaId(name) for name in "abpq")


def request_of(prompt: bytes, number: int = 0) -> Request:
    return Request(RequestId(str(number)), len(prompt), prompt)


def fleet_of(name: str, *views: ReplicaView, **section: Any) -> Fleet:
    fleet = Fleet(make(name, Random(1), **section), "us")
    for view in views:
        fleet.add(view)
    return fleet


def served(fleet: Fleet, prompt: bytes, target: ReplicaId) -> None:
    flight = fleet.sent(request_of(prompt), RoutingDecision(target, RoutingReason.TURN), 0.0)
    fleet.finished(flight, 0.2, 1)


def choose(fleet: Fleet, num_tokens: int = 1000) -> RoutingDecision:
    return fleet.choose(request_of(b"x" * num_tokens), 1.0)


FAR = {"round_trip_ms": 100.0}
FULL = {"outstanding": 32}


@pytest.mark.parametrize(
    ("section", "near", "far", "hit_on_far", "target"),
    [
        # 100 ms buy 1064 tokens of prefill at 0.094 ms, or 5000 of backlog at 0.02.
        ({}, {}, FAR, 0, A),
        ({}, {}, FAR, 900, A),
        ({}, {}, FAR | {"round_trip_ms": 50.0}, 900, B),
        ({}, {"uncached_tokens": 4000}, FAR, 0, A),
        ({}, {"uncached_tokens": 6000}, FAR, 0, B),
        ({"w_queue": 0.5}, {"uncached_tokens": 6000}, FAR, 0, A),
        ({"w_rtt": 0.5}, {"uncached_tokens": 3000}, FAR, 0, B),
        # As printed 100 ms count as 28 tokens, and what is decoding counts as queued.
        ({"preset": "published"}, {}, FAR, 30, B),
        ({"preset": "published"}, {"outstanding_tokens": 60}, FAR, 0, B),
        ({}, {"outstanding_tokens": 60_000}, FAR, 0, A),
    ],
)
def test_gorgo_weighs_distance_prefill_and_backlog(section, near, far, hit_on_far, target):
    fleet = fleet_of("gorgo", ReplicaView(A, **near), ReplicaView(B, **far), **section)
    if hit_on_far:
        served(fleet, b"x" * hit_on_far, B)
        fleet.policy.rates = Rates(0.094, 0.02)  # type: ignore[attr-defined]
    assert choose(fleet).target == target


def test_gorgo_tells_its_costs_in_milliseconds_and_draws_among_equals():
    fleet = fleet_of("gorgo", ReplicaView(A), ReplicaView(B, round_trip_ms=1.0))
    decision = choose(fleet)
    assert decision.scores_ms == pytest.approx({"a": 94.0, "b": 95.0})
    assert {choose(fleet).target for _ in range(40)} == {A, B}
    exact = fleet_of("gorgo", ReplicaView(A), ReplicaView(B, round_trip_ms=1.0), noise_ms=0.0)
    assert {choose(exact).target for _ in range(40)} == {A}


@pytest.mark.parametrize(
    ("section", "near", "peer", "hit_on_peer", "target"),
    [
        ({}, {}, {}, 0, A),
        # Full here: waiting costs the backlog, going the distance and the peer's backlog.
        ({}, FULL | {"uncached_tokens": 5000}, FAR, 0, P),
        ({}, FULL | {"uncached_tokens": 500}, FAR, 0, None),
        ({}, FULL | {"uncached_tokens": 5000}, FAR | {"uncached_tokens": 9000}, 0, None),
        # As printed a peer's load is nobody's business.
        (
            {"preset": "published"},
            FULL | {"outstanding_tokens": 5000},
            FAR | {"outstanding_tokens": 90_000},
            0,
            P,
        ),
        ({}, FULL | {"uncached_tokens": 500}, FAR, 900, P),
        ({}, {"kv_used_fraction": 0.96, "uncached_tokens": 5000}, FAR, 0, P),
        ({"preset": "proxy"}, {}, FAR, 900, A),
        ({"preset": "proxy"}, {"outstanding": 10}, FAR, 0, None),
    ],
)
def test_gorgo_v1_stays_or_goes(section, near, peer, hit_on_peer, target):
    fleet = fleet_of("gorgo_v1", ReplicaView(A, **near), PeerView(P, **peer), **section)
    if hit_on_peer:
        served(fleet, b"x" * hit_on_peer, P)
    assert choose(fleet).target == target


def test_gorgo_v1_counts_its_own_queue_and_a_peer_s():
    views = (ReplicaView(A, outstanding=32), PeerView(P, round_trip_ms=100.0))
    fleet = fleet_of("gorgo_v1", *views)
    served(fleet, b"y" * 1000, A)
    assert choose(fleet).target is None
    fleet.queue_length = 3
    assert choose(fleet).target == P
    views[1].queue_length = 3
    assert choose(fleet).target is None


def test_gorgo_v1_as_coded_looks_at_peers_without_a_hit_only_where_none_has_one():
    far, near = PeerView(P, round_trip_ms=90.0), PeerView(Q, round_trip_ms=1.0)
    fleet = fleet_of(
        "gorgo_v1",
        ReplicaView(A, outstanding=5, outstanding_tokens=9000),
        far,
        near,
        preset="as-coded",
    )
    assert choose(fleet).target == Q
    served(fleet, b"x" * 10, P)
    assert choose(fleet).target == P


def test_the_proxy_gives_every_replica_the_same_terms():
    fleet = fleet_of(
        "gorgo_v1",
        ReplicaView(A, uncached_tokens=5000),
        ReplicaView(B, round_trip_ms=200.0),
        preset="proxy",
    )
    decision = choose(fleet)
    assert decision.target == B
    assert decision.scores_ms == pytest.approx({"a": 564.0, "b": 294.0})


def test_rates_find_what_made_the_times():
    rates, rng = Rates(0.5, 0.5), Random(3)
    for _ in range(600):
        uncached, backlog = rng.uniform(0, 8000), rng.uniform(0, 30_000)
        rates.learn(uncached, backlog, 150 + 0.08 * uncached + 0.01 * backlog + rng.gauss(0, 5))
    assert rates.prefill_ms == pytest.approx(0.08, rel=0.05)
    assert rates.queue_ms == pytest.approx(0.01, rel=0.1)
    assert rates.base_ms == pytest.approx(150, rel=0.15)
    again = Rates(0.5, 0.5)
    again.restore(rates.state())
    assert again.prefill_ms == pytest.approx(rates.prefill_ms, rel=1e-3)


def test_rates_are_never_negative_and_keep_the_assumed_ones_without_evidence():
    rates, rng = Rates(0.094, 0.02), Random(3)
    assert (rates.prefill_ms, rates.queue_ms) == (0.094, 0.02)
    rates.learn(0, 0, 50.0)
    assert rates.prefill_ms == pytest.approx(0.094, rel=0.01)
    for _ in range(400):
        backlog = rng.uniform(0, 30_000)
        rates.learn(1000, backlog, 900 - 0.02 * backlog)
    assert min(rates.prefill_ms, rates.queue_ms, rates.base_ms) >= 0


def drive(tuner: CodedTuner, samples: int, world: Any) -> None:
    """Feeds the tuner what ``world`` makes of its weights: the median time to first token."""
    rng = Random(samples)
    for _ in range(samples):
        tuner.sample(world(*tuner.weights) * rng.lognormvariate(0, 0.3))


def test_the_goal_is_won_by_ruining_end_to_end():
    """The less the queue counts, the better the first tokens, and the worse all else."""
    for seed in range(3):
        coded = CodedTuner(Random(seed))
        drive(coded, 15_000, lambda _, w_queue: 200 * w_queue)
        assert coded.best[1] < 0.1
        assert all(low <= one <= high for one, (low, high) in zip(coded.best, RANGES, strict=True))


def test_the_coded_tuner_ends_when_its_schedule_runs_out_whatever_it_found():
    coded = CodedTuner(Random(1))
    drive(coded, 128, lambda *_: 100.0)
    assert coded.num_evaluations == 1
    first = coded.best_score
    for _ in range(19 * 32):
        coded.sample(500.0)
    # All worse than the first: the step shrinks at every evaluation from the eighth on.
    assert coded.best_score == first > -500
    for _ in range(20 * 32):
        coded.sample(500.0)
    assert coded.is_over
    assert coded.sigma < SIGMA_FLOOR


def test_the_coded_rule_accepts_what_is_a_little_worse():
    coded = CodedTuner(Random(1))
    for _ in range(128):
        coded.sample(1000.0)
    for _ in range(128):
        coded.sample(1004.0)
    assert coded.best_score == pytest.approx(-1004.0)


def test_what_is_held_is_not_learnt_from_and_the_search_begins_anew():
    fleet = fleet_of("gorgo", ReplicaView(A), preset="as-coded")
    policy: Any = fleet.policy

    def weights_of(count: int) -> set[tuple[float, ...]]:
        seen = set()
        for _ in range(count):
            served(fleet, b"x", A)
            seen.add(policy.weights)
        return seen

    assert len(weights_of(300)) > 2
    policy.hold_safe(True)
    assert weights_of(300) == {START}
    policy.hold_safe(False)
    assert len(weights_of(300)) > 2


def test_state_survives_and_what_is_no_state_is_refused_whole():
    tuner = CodedTuner(Random(1))
    drive(tuner, 3000, lambda w_rtt, _: 100 / w_rtt)
    state = tuner.state()
    other = CodedTuner(Random(9))
    other.restore(state)
    assert other.state() == state
    assert other.weights == tuner.best
    for wrong in (
        {},
        state | {"incumbent": [1.0]},
        state | {"incumbent": [1.0, float("nan")]},
        state | {"incumbent": "heavy"},
        state | {"is_over": 2},
    ):
        fresh = CodedTuner(Random(9))
        with pytest.raises(UserError, match="remove the saved state"):
            fresh.restore(wrong)
        assert fresh.weights == START
