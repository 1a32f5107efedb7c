"""GORGO: what it costs to go elsewhere, what tokens cost, and a tuner that is not fooled."""

from __future__ import annotations

from math import log
from random import Random
from typing import Any

import pytest

from banaserve.base.errors import UserError
from banaserve.base.types import RequestId
from banaserve_route.policies.fleet import Fleet
from banaserve_route.policies.gorgo.tuner import Tuner, TunerOptions
from banaserve_route.policies.gorgo.tuner_coded import SIGMA_FLOOR, CodedTuner
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


def drive(
    tuner: Tuner | CodedTuner, seed: int, samples: int, world: Any, until_accepted: int = 10**9
) -> None:
    """Feeds the tuner what ``world`` makes of its weights: median first token and end to end."""
    rng = Random(seed)
    for _ in range(samples):
        ttft_ms, e2e_ms = world(*tuner.weights)
        noise = rng.lognormvariate(0, 0.3)
        tuner.sample(tuner.phase, ttft_ms * noise, e2e_ms * noise)
        if isinstance(tuner, Tuner) and tuner.num_accepted >= until_accepted:
            return


def bowl(w_rtt: float, w_queue: float) -> tuple[float, float]:
    """Best at 3 and 0.4."""
    away = log(w_rtt / 3) ** 2 + log(w_queue / 0.4) ** 2
    return 200 * (1 + away), 2000 * (1 + 0.3 * away)


def hackable(w_rtt: float, w_queue: float) -> tuple[float, float]:
    """The less the queue counts, the better the first tokens and the worse everything else."""
    return 200 * w_queue, 2000 / w_queue**0.7


def test_the_tuner_finds_better_weights_and_stays_within_its_bounds():
    gains = []
    for seed in range(5):
        tuner = Tuner((1.0, 1.0), TunerOptions(window=128), Random(seed))
        drive(tuner, seed, 20_000, bowl)
        before, after = bowl(1.0, 1.0), bowl(*tuner.incumbent)
        gains.append(after[0] / before[0])
        assert all(0.1 <= weight <= 10 for weight in tuner.incumbent)
        assert tuner.num_evaluations > 20
    assert sorted(gains)[2] < 0.6, gains


def test_the_goal_cannot_be_won_by_ruining_end_to_end():
    for seed in range(3):
        tuner = Tuner((1.0, 1.0), TunerOptions(), Random(seed))
        drive(tuner, seed, 15_000, hackable)
        assert tuner.incumbent[1] > 0.6, tuner.incumbent
        coded = CodedTuner(Random(seed))
        drive(coded, seed, 15_000, hackable)
        assert coded.best[1] < 0.1, "the published goal is won this way"


def test_the_coded_tuner_ends_when_its_schedule_runs_out_whatever_it_found():
    coded = CodedTuner(Random(1))
    drive(coded, 1, 128, lambda *_: (100.0, 100.0))
    assert coded.num_evaluations == 1
    first = coded.best_score
    for _ in range(19 * 32):
        coded.sample(0, 500.0, 500.0)
    # All worse than the first: the step shrinks at every evaluation from the eighth on.
    assert coded.best_score == first > -500
    for _ in range(20 * 32):
        coded.sample(0, 500.0, 500.0)
    assert coded.is_over
    assert coded.sigma < SIGMA_FLOOR


def test_the_coded_rule_accepts_what_is_a_little_worse():
    coded = CodedTuner(Random(1))
    for _ in range(128):
        coded.sample(0, 1000.0, 1.0)
    for _ in range(128):
        coded.sample(0, 1004.0, 1.0)
    assert coded.best_score == pytest.approx(-1004.0)


def test_samples_of_another_phase_and_nonsense_are_dropped():
    tuner = Tuner((1.0, 1.0), TunerOptions(window=8), Random(1))
    for _ in range(20):
        tuner.sample(99, 1.0, 1.0)
        tuner.sample(tuner.phase, float("nan"), 1.0)
    assert tuner.phase == 0
    for _ in range(8):
        tuner.sample(0, 100.0, 100.0)
    assert tuner.phase == 1
    assert tuner.weights != (1.0, 1.0)


def test_failing_is_no_way_to_score_and_a_hopeless_candidate_ends_early():
    tuner = Tuner((1.0, 1.0), TunerOptions(window=20), Random(1))
    for _ in range(20):
        tuner.sample(0, 100.0, 100.0)
    for _ in range(11):
        tuner.failed(1)
    assert tuner.phase == 2
    assert tuner.incumbent == tuner.weights == (1.0, 1.0)


def test_a_client_that_goes_away_says_nothing_of_the_weights():
    tuned = {"tuning": "repaired", "tuner": TunerOptions(window=8)}
    for is_fault, phase in ((False, 0), (True, 1)):
        fleet = fleet_of("gorgo", ReplicaView(A), **tuned)
        for number in range(8):
            flight = fleet.sent(
                request_of(b"x", number), RoutingDecision(A, RoutingReason.TURN), 0.0
            )
            fleet.failed(flight, 1.0, is_fault)
        assert fleet.policy.tuner.phase == phase  # type: ignore[attr-defined]


def test_the_tuner_s_options_come_from_a_table_and_are_checked():
    assert make("gorgo", Random(1), tuner={"window": 99}).options.tuner.window == 99  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="did you mean window"):
        make("gorgo", Random(1), tuner={"windows": 99})
    with pytest.raises(UserError, match="window is 1"):
        make("gorgo", Random(1), tuner={"window": 1})


def test_safe_weights_are_tried_again_and_win_when_the_world_has_changed():
    tuner = Tuner((1.0, 1.0), TunerOptions(window=64, safe_every=4), Random(2))
    drive(tuner, 2, 40_000, bowl, until_accepted=2)
    assert tuner.incumbent != (1.0, 1.0)

    def changed(w_rtt: float, w_queue: float) -> tuple[float, float]:
        away = abs(log(w_rtt)) + abs(log(w_queue))
        return 200 * (1 + 3 * away), 2000 * (1 + 3 * away)

    drive(tuner, 3, 8000, changed)
    assert tuner.num_returns >= 1
    tuner.return_to_safe()
    assert tuner.weights == (1.0, 1.0)


def test_state_survives_and_what_is_no_state_is_refused_whole():
    tuner = Tuner((1.0, 1.0), TunerOptions(window=32), Random(1))
    drive(tuner, 1, 3000, bowl)
    state = tuner.state()
    other = Tuner((1.0, 1.0), TunerOptions(window=32), Random(9))
    other.restore(state)
    assert other.state() == state
    assert other.weights == tuner.incumbent
    for wrong in (
        {},
        state | {"incumbent": [1.0]},
        state | {"incumbent": [1.0, 99.0]},
        state | {"incumbent": [1.0, float("nan")]},
        state | {"sigma": -1.0},
        state | {"sigma": "big"},
        state | {"outcomes": "1010"},
        state | {"num_accepted": -1},
    ):
        fresh = Tuner((1.0, 1.0), TunerOptions(), Random(9))
        with pytest.raises(UserError, match="remove the saved state"):
            fresh.restore(wrong)
        assert fresh.weights == (1.0, 1.0)


def test_bounds_that_decide_are_counted():
    def steep(w_rtt: float, w_queue: float) -> tuple[float, float]:
        return 1000 / w_rtt**0.5, 1000 / w_rtt**0.5

    tuner = Tuner((1.0, 1.0), TunerOptions(window=32, low=0.5, high=2.0), Random(1))
    drive(tuner, 1, 8000, steep)
    assert tuner.num_bound_hits > 10
    assert tuner.incumbent[0] > 1.5
