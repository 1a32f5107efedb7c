"""Regions in virtual time: nothing is lost or doubled, and the same seed gives the same run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

import pytest

from banaserve.base.types import RequestId
from banaserve.sim.timeline import Timeline
from banaserve_route.policies.interface import Request
from banaserve_route.policies.registry import make
from banaserve_route.sim.balancer import SimBalancer
from banaserve_route.sim.replica import UNIT_BYTES, Accelerator, ReplicaJob, SimReplica
from banaserve_route.sim.world import RegionSystem, Setting, simulate
from client_programs import chat, shared_prefixes

FAR = {("us", "eu"): 90.0, ("us", "asia"): 150.0, ("eu", "asia"): 220.0}
CHAT = chat(256, 120, 150)
WORLD = Setting(
    replicas={"us": 2, "eu": 1, "asia": 1},
    clients={"us": [(120, CHAT)], "eu": [(4, CHAT)], "asia": [(4, CHAT)]},
    round_trips_ms=FAR,
    duration_s=40.0,
)
ONE = Setting(
    replicas={"us": 3},
    clients={"us": [(40, shared_prefixes(5, 800, 100, 40, 1.1))]},
    duration_s=200.0,
    start_within_s=20.0,
)


@pytest.mark.parametrize(
    "system",
    [
        RegionSystem("round_robin", central=True),
        RegionSystem("skywalker"),
        RegionSystem("skywalker_ch"),
        RegionSystem("gorgo_v1"),
        RegionSystem("gorgo", central=True),
        RegionSystem("preble", central=True),
        RegionSystem("cache_aware", central=True, staleness_s=1.0),
    ],
    ids=lambda system: system.policy,
)
def test_every_request_of_an_open_loop_is_answered_once(system):
    outcome = simulate(ONE, system, seed=1)
    assert len(outcome.records) == 40
    assert outcome.num_censored == 0
    for one in outcome.records:
        assert one.sent_s < one.first_s <= one.done_s
        assert 0 <= one.hit_tokens < one.prompt_tokens
    assert outcome.hit_fraction > 0.2


@pytest.mark.parametrize("policy", ["skywalker", "gorgo_v1", "gorgo"])
def test_the_same_seed_gives_the_same_run_and_another_one_does_not(policy):
    one, same, other = (simulate(WORLD, RegionSystem(policy), seed) for seed in (1, 1, 2))
    assert one.records == same.records
    assert one.records != other.records


def test_clients_ask_the_same_under_every_system():
    def first_asks(system: RegionSystem) -> list[tuple[str, int, int]]:
        outcome = simulate(replace(WORLD, duration_s=4.9), system, 1)
        return sorted((one.region, one.prompt_tokens, one.output_tokens) for one in outcome.records)

    assert first_asks(RegionSystem("skywalker")) == first_asks(
        RegionSystem("round_robin", central=True)
    )


def test_a_full_region_s_requests_are_served_elsewhere():
    alone = simulate(WORLD, RegionSystem("skywalker", forwards=False), 1)
    together = simulate(WORLD, RegionSystem("skywalker"), 1)
    assert together.output_tokens_per_s > alone.output_tokens_per_s
    eu = [one.first_s - one.sent_s for one in alone.done() if one.region == "eu"]
    assert min(eu) < 2.0


def test_distance_and_computing_are_in_the_times():
    quiet = Setting(
        replicas={"us": 1},
        clients={"us": [], "asia": [(1, shared_prefixes(1, 1600, 16, 32, 1.0))]},
        round_trips_ms=FAR,
        start_within_s=1.0,
        accelerator=Accelerator(step_ms=50, prefill_ms_per_token=0.5, decode_ms_per_request=0),
    )
    [one] = simulate(quiet, RegionSystem("round_robin", central=True), 1).records
    # 150 ms there and back, 2 ms inside the region, one step with the whole prompt.
    assert one.first_s - one.sent_s == pytest.approx(
        0.152 + 0.05 + 0.0005 * one.prompt_tokens, abs=1e-6
    )
    steps = max(1, one.output_tokens)
    assert one.done_s - one.first_s == pytest.approx(0.05 * (steps - 1), abs=1e-6)


def test_priority_groups_let_cached_prompts_overtake():
    rng = Random(1)
    known, other = (rng.randbytes(20 * UNIT_BYTES) for _ in range(2))
    for num_groups, order in ((1, "kou"), (10, "kuo")):
        timeline, begun = Timeline(), []
        spec = Accelerator(max_running=1, num_groups=num_groups)
        replica = SimReplica("a", "us", spec, timeline)
        for name, prompt in (("k", known), ("o", other), ("u", known + rng.randbytes(UNIT_BYTES))):
            request = Request(RequestId(name), len(prompt) // UNIT_BYTES * 16, prompt)
            output = rng.randbytes(2 * UNIT_BYTES)
            job = ReplicaJob(request, output, partial(begun.append, name), lambda: None)
            replica.submit(job)
        timeline.run(60.0)
        assert "".join(begun) == order


def test_a_policy_gets_the_reports_and_the_peers_that_it_declares_to_need():
    for policy, has_reports, has_peers in (
        ("round_robin", False, False),
        ("cache_aware", False, False),
        ("least_load", True, False),
        ("skywalker", True, True),
    ):
        timeline = Timeline()
        round_trips_ms = {(one, other): 2.0 for one in ("eu", "us") for other in ("eu", "us")}
        replica = SimReplica("us-0", "us", Accelerator(), timeline)
        us, eu = (
            SimBalancer(
                region,
                make(policy, Random(1), unit_bytes=UNIT_BYTES),
                [replica] if region == "us" else [],
                round_trips_ms,
                timeline,
            )
            for region in ("us", "eu")
        )
        us.connect([eu])
        timeline.run(1.0)
        view = us.fleet.view(1.0)
        assert [one.reported_at_s is not None for one in view.replicas] == [has_reports], policy
        assert [one.id for one in view.peers] == ["balancer-eu"] * has_peers, policy
