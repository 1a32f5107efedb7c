"""Simulated clusters: hand-over, prefixes, cells, moves, deaths, reproducibility."""

from __future__ import annotations

from typing import Any

import pytest

from banaserve.base.errors import UserError
from banaserve.base.types import (
    ClusterView,
    InstanceId,
    Module,
    ModulePlacement,
    MoveModule,
    RequestView,
    ReturnModule,
    Role,
    Route,
)
from banaserve.orchestrator.control.costs.profile import load
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve.orchestrator.control.costs.transfers import overlapped_s
from banaserve.orchestrator.control.routing.slo_aware import SloAware
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.request import SimRequest
from banaserve.sim.result import LatencyLimits
from banaserve.sim.system import System, preset
from banaserve.sim.timeline import Timeline
from banaserve_bench.simulation.events import Event, arrange
from banaserve_bench.simulation.run import simulate
from banaserve_bench.simulation.workload import Lengths, LoadPhase, drawn
from engine_invariants import check_engine

PROFILE = load("opt-13b-a100")
TOKEN_BYTES = 819_200
BUSY = LoadPhase(
    duration_s=20,
    rate_per_s=15,
    prompt=Lengths(kind="lognormal", mean=300, high=1500),
    output=Lengths(kind="lognormal", mean=60, high=300),
)


def built(system: System) -> tuple[Timeline, SimCluster]:
    timeline = Timeline()
    return timeline, SimCluster(timeline, PROFILE, system)


@pytest.mark.parametrize("kind", ["static", "banaserve"])
def test_a_request_on_two_instances_by_hand(kind: str) -> None:
    """Prefill 127.132 ms, a fetch of 1,000 tokens at 25 GB/s, four decode steps.

    A pull takes two hops, too, and its bytes come before the first step; a fetch from the store
    overlaps with that step, layer by layer.
    """
    _, cluster = built(preset(kind, prefill=1, decode=1))
    cluster.run([SimRequest(0, 0.0, 1000, 5)])
    [request] = cluster.finished
    assert request.first_s == pytest.approx(0.127132)
    fetch_s = 1000 * TOKEN_BYTES / 25e9
    first_s, *later_s = (0.01993 + 0.00003851 + 6.269e-7 * (1000 + n) for n in range(4))
    if kind == "static":
        first_s += fetch_s + 40e-6
    else:
        first_s = overlapped_s(fetch_s, first_s, 0.0, PROFILE.model.num_layers)
    assert request.end_s == pytest.approx(0.127132 + first_s + sum(later_s))


@pytest.mark.parametrize(("kind", "is_kept"), [("static", True), ("banaserve", False)])
def test_pulling_keeps_the_kv_of_prefill_until_it_is_fetched(kind: str, is_kept: bool) -> None:
    timeline, cluster = built(preset(kind, prefill=1, decode=1))
    timeline.at(0.0, cluster.cells[0].submit, SimRequest(0, 0.0, 1000, 5))
    timeline.run(until_s=0.13)
    _, prefill = cluster.find("p0")
    assert (prefill.engine.used_tokens == 1000) is is_kept
    timeline.run(until_s=0.5)
    assert prefill.engine.used_tokens == 0


def test_pulls_queue_up_at_a_link() -> None:
    """Two prompts computed side by side: the second one's KV comes 32.8 ms after the first's."""
    _, cluster = built(preset("static", prefill=2, decode=1))
    cluster.run([SimRequest(n, 0.0, 1000, 2) for n in range(2)])
    first, second = sorted(cluster.finished, key=lambda request: request.end_s)
    assert first.first_s == second.first_s
    assert second.end_s - first.end_s == pytest.approx(1000 * TOKEN_BYTES / 25e9, rel=0.01)


def test_a_prefix_in_the_store_is_not_computed_again() -> None:
    hits = {}
    for cache in ("global", "none"):
        _, cluster = built(preset("banaserve", prefill=2, decode=1, cache=cache))
        requests = [SimRequest(n, n * 2.0, 1600, 2, (1, 2, 3, 40 + n)) for n in range(4)]
        cluster.run(requests)
        hits[cache] = sum(r.first_s - r.arrival_s for r in cluster.finished)
    full_s = 0.0181 + 1600 * 0.10191e-3 + 1600**2 * 7.122e-9
    assert hits["none"] == pytest.approx(4 * full_s)
    # Three of four find 1,536 tokens, which take 50 ms to fetch: longer than computing 64.
    fetch_s = 1536 * TOKEN_BYTES / 25e9
    compute_s = 0.0181 + 64 * 0.10191e-3 + 64 * (64 + 2 * 1536) * 7.122e-9
    assert hits["global"] == pytest.approx(full_s + 3 * (fetch_s + compute_s / 40))


def test_a_local_cache_is_found_only_where_it_is() -> None:
    system = preset("colocated", colocated=2, routing="round_robin")
    _, cluster = built(system)
    cluster.run([SimRequest(n, n * 2.0, 1600, 2, (1, 2, 3, 4)) for n in range(4)])
    took = [round(r.first_s - r.arrival_s, 3) for r in cluster.finished]
    assert took[0] == took[1] > took[2] == took[3]
    # All but the last of 1,600 tokens are in the engine's own cache: nothing is fetched.
    step_s, _ = StepCosts(PROFILE).mixed_s(1, 1 + 2 * 1599, 0, 0)
    assert took[2] == pytest.approx(step_s, abs=1e-3)


@pytest.mark.parametrize("kind", ["colocated", "static", "banaserve"])
def test_a_run_is_reproducible_and_another_seed_is_another_run(kind: str) -> None:
    counts: dict[str, Any] = (
        {"colocated": 4} if kind == "colocated" else {"prefill": 2, "decode": 2}
    )
    system = preset(kind, **counts)
    first, again, other = (simulate(PROFILE, system, drawn([BUSY], seed)) for seed in (1, 1, 2))
    assert first == again
    assert first["e2e_mean_s"] != other["e2e_mean_s"]
    assert first["num_finished"] == first["num_requests"]
    assert first["time"].startswith("simulated")


def test_cells_share_the_load() -> None:
    one = simulate(PROFILE, preset("static", prefill=4, decode=4), drawn([BUSY], 1))
    system = preset("static", prefill=4, decode=4, cell_size=2)
    _, cluster = built(system)
    assert [sorted(cell.instances) for cell in cluster.cells] == [
        [f"d{n}", f"p{n}"] for n in range(4)
    ]
    cluster.run(drawn([BUSY], 1))
    counts = [len(cell.finished) for cell in cluster.cells]
    assert sum(counts) == one["num_requests"]
    # Each gets a quarter, give or take what is not yet known to have ended.
    assert max(counts) - min(counts) < 0.25 * sum(counts) / 4
    with pytest.raises(UserError, match="lack a role"):
        built(preset("static", prefill=3, decode=1, cell_size=2))


def test_a_request_that_fits_nowhere_is_refused_and_counted() -> None:
    result = simulate(
        PROFILE,
        preset("static", prefill=1, decode=1),
        [SimRequest(0, 0.0, 2000, 100), SimRequest(1, 0.0, 1900, 100)],
    )
    assert (result["num_refused"], result["num_finished"]) == (1, 1)
    assert result["goodput_fraction"] == 0.5


def full_decode_cluster(**options: Any) -> tuple[Timeline, SimCluster]:
    """Long contexts that fill the decode instance within half a minute."""
    timeline, cluster = built(
        preset(
            "banaserve",
            prefill=1,
            decode=1,
            migration_options={"weights_are_shared": True, **options},
        )
    )
    return timeline, cluster


WAVE = LoadPhase(
    duration_s=60,
    rate_per_s=4.5,
    prompt=Lengths(kind="lognormal", mean=1500, high=1700, spread=0.1),
    output=Lengths(kind="fixed", mean=300),
)


def test_a_moved_range_changes_memory_costs_and_views() -> None:
    _, cluster = full_decode_cluster()
    cluster.run(drawn([WAVE], 3))
    cell = cluster.cells[0]
    actions = [step.action for _, step in cell.placing.done]
    assert any(isinstance(action, MoveModule) for action in actions)
    assert cluster.find("d0")[1].epoch == sum(
        isinstance(action, MoveModule | ReturnModule) for action in actions
    )
    _, host = cluster.find("d0")
    _, guest = cluster.find("p0")
    assert sum(p.guest_bytes for p in host.placements) == guest.guest_bytes
    assert host.engine.kv_tokens == host.kv_blocks * 16
    view = cell.view().instances[InstanceId("d0")]
    assert view.placements == host.placements
    assert (host.engine.kv_tokens > 66_144) == bool(host.placements)


def test_costs_follow_what_is_away() -> None:
    _, cluster = built(
        preset("banaserve", prefill=1, decode=1, migration="still", overlap_fraction=0.5)
    )
    cell = cluster.cells[0]
    _, host = cluster.find("d0")
    _, guest = cluster.find("p0")
    module = Module(30, 40)
    host.placements = (ModulePlacement(module, host.id, guest.id, 1, 0.0, guest_bytes=10**9),)
    guest.guest_bytes = 10**9
    host.busy_fraction = 0.8
    cell.placing.bend()
    assert host.engine.costs.relief == pytest.approx(0.5 * 0.25)
    assert guest.engine.costs.guest_share == pytest.approx(0.25 * 0.8)
    assert host.engine.costs.hop_s == pytest.approx(40e-6)
    cell.placing.lose(guest)
    assert host.placements == ()
    assert guest.guest_bytes == 0
    assert host.engine.costs.relief == guest.engine.costs.guest_share == 0


@pytest.mark.parametrize("kind", ["kill_guest_in_move", "kill_host_in_move"])
def test_a_death_in_the_middle_of_a_move_loses_no_request(kind: str) -> None:
    timeline, cluster = full_decode_cluster()
    arrange(Event(at_s=5.0, kind=kind, back_after_s=5.0), cluster, timeline)
    requests = list(drawn([WAVE], 3))
    cluster.run(requests)
    cell = cluster.cells[0]
    assert cell.placing.num_aborted == 1
    assert cell.num_restarted > 0
    assert len(cluster.finished) == len(requests)
    assert all(r.generated == r.output_tokens for r in requests)
    assert cell.load == 0
    for instance in cell.instances.values():
        check_engine(instance.engine)
        assert instance.engine.used_tokens == 0
        assert instance.inflight == 0
        assert instance.inflight_prefill_tokens == 0


def test_a_death_in_a_move_waits_for_a_load_that_begins_later() -> None:
    """Nothing is under way, and nobody is there, when the waiting begins."""
    timeline, cluster = full_decode_cluster()
    arrange(Event(at_s=0.0, kind="kill_host_in_move", back_after_s=5.0), cluster, timeline)
    requests = list(drawn([WAVE], 3))
    for request in requests:
        request.arrival_s += 30.0
    cluster.run(requests)
    assert cluster.cells[0].placing.num_aborted == 1
    assert len(cluster.finished) == len(requests)


def test_a_death_in_a_move_that_never_comes_keeps_nothing_going() -> None:
    timeline, cluster = built(preset("banaserve", prefill=1, decode=1))
    _, decode = cluster.find("d0")
    timeline.at(0.0, lambda _: decode.engine.resize(10))
    arrange(Event(at_s=0.5, kind="kill_guest_in_move"), cluster, timeline)
    cluster.run([SimRequest(0, 1.0, 1000, 5)])
    assert cluster.finished == []
    assert timeline.now_s == 60.0


@pytest.mark.parametrize("kind", ["static", "banaserve"])
@pytest.mark.parametrize("instance", ["p0", "d1"])
def test_a_dead_instance_is_routed_around(kind: str, instance: str) -> None:
    timeline, cluster = built(preset(kind, prefill=2, decode=2))
    cell, victim = cluster.find(instance)

    def strike(_: None) -> None:
        """Dies when it has something to do."""
        if victim.inflight:
            cell.kill(victim.id, None)
        else:
            timeline.after(0.01, strike)

    timeline.at(8.0, strike)
    requests = list(drawn([BUSY], 1))
    cluster.run(requests)
    assert len(cluster.finished) == len(requests)
    assert cluster.cells[0].num_restarted > 0
    assert all(i.engine.used_tokens == 0 for i in cluster.cells[0].instances.values())
    assert not cluster.cells[0].view().instances[InstanceId(instance)].ready


def test_a_slow_instance_is_slow() -> None:
    ends = []
    for factor in (1.0, 3.0):
        timeline, cluster = built(preset("colocated", colocated=1))
        arrange(Event(at_s=0.0, kind="slow", instance="c0", factor=factor), cluster, timeline)
        cluster.run([SimRequest(0, 0.0, 100, 50)])
        ends.append(cluster.finished[0].end_s)
    assert ends[1] == pytest.approx(3 * ends[0])


def test_roles_are_the_routers_knowledge() -> None:
    """A switched instance gets the other legs at once and finishes what it had."""
    phase = LoadPhase(
        duration_s=30,
        rate_per_s=24,
        prompt=Lengths(kind="fixed", mean=900),
        output=Lengths(kind="fixed", mean=16),
    )
    _, cluster = built(preset("banaserve", prefill=2, decode=2))
    cluster.run(drawn([phase], 1))
    roles = [instance.role for instance in cluster.cells[0].instances.values()]
    assert roles.count(Role.PREFILL) == 3
    assert all(r.generated == 16 for r in cluster.finished)


def test_routing_knows_what_a_client_allows_and_not_what_will_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, route = [], SloAware.route

    def noting(policy: SloAware, request: RequestView, cluster: ClusterView) -> Route:
        known.append(request.max_output_tokens)
        return route(policy, request, cluster)

    monkeypatch.setattr(SloAware, "route", noting)
    _, cluster = built(System(kind="banaserve", colocated=1, routing="slo_aware"))
    cluster.run([SimRequest(0, 0.0, 100, 50), SimRequest(1, 1.0, 100, 50, max_tokens=64)])
    assert known == [0, 64]
    assert [request.generated for request in cluster.finished] == [50, 50]


@pytest.mark.parametrize("migration", ["published", "repaired", "still"])
def test_every_policy_leaves_a_cluster_that_serves(migration: str) -> None:
    """Whatever it moves: all requests end, with every token."""
    _, cluster = built(preset("banaserve", prefill=2, decode=2, migration=migration))
    requests = list(drawn([WAVE, BUSY], 1))
    cluster.run(requests)
    assert len(cluster.finished) == len(requests)
    assert all(r.generated == r.output_tokens for r in requests)


def test_a_cluster_in_which_nothing_can_happen_is_given_up() -> None:
    timeline, cluster = built(preset("banaserve", prefill=1, decode=1))
    _, decode = cluster.find("d0")
    timeline.at(0.0, lambda _: decode.engine.resize(10))
    cluster.run([SimRequest(0, 1.0, 1000, 5)])
    assert cluster.finished == []
    assert timeline.now_s == 60.0


@pytest.mark.parametrize("kind", ["colocated", "banaserve"])
def test_a_cluster_of_which_nothing_is_left_comes_to_an_end(kind: str) -> None:
    counts = {"colocated": 1} if kind == "colocated" else {"prefill": 1, "decode": 1}
    timeline, cluster = built(preset(kind, **counts))
    for name in cluster.cells[0].instances:
        arrange(Event(at_s=2.0, kind="kill", instance=name), cluster, timeline)
    arrange(Event(at_s=2.0, kind="kill_guest_in_move"), cluster, timeline)

    def late(_: None) -> None:
        assert timeline.num_events < 1500  # nobody goes on asking

    timeline.at(1000.0, late)
    cluster.run([SimRequest(number, float(number), 100, 50) for number in range(5)])
    assert 0 < len(cluster.finished) < 5


def test_a_cluster_that_comes_back_serves_what_waited() -> None:
    timeline, cluster = built(preset("colocated", colocated=1))
    event = Event(at_s=2.0, kind="kill", instance="c0", back_after_s=5.0)
    arrange(event, cluster, timeline)
    cluster.run([SimRequest(number, float(number), 100, 50) for number in range(5)])
    assert len(cluster.finished) == 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "banasrve"}, "did you mean banaserve"),
        ({"kind": "static"}, "a system needs instances"),
        ({"kind": "static", "prefil": 1}, "did you mean prefill"),
        ({"kind": "static", "prefill": -1, "decode": 1}, "prefill is -1"),
        ({"kind": "static", "prefill": 1, "decode": 1, "handover": "push"}, "unknown handover"),
        ({"kind": "static", "prefill": 1, "decode": 1, "control_s": 0}, "control_s is 0"),
        ({"kind": "static", "prefill": 1, "decode": 1, "routing": "least"}, "least_requests"),
        (
            {"kind": "banaserve", "prefill": 1, "decode": 1, "migration_options": {"roh": 1}},
            "did you mean rho",
        ),
        (
            {"kind": "static", "prefill": 1, "decode": 1, "limits": {"step_token": 1}},
            "did you mean step_tokens",
        ),
        (
            {"kind": "static", "prefill": 1, "decode": 1, "limits": {"step_tokens": 0}},
            "step_tokens is 0: give a whole number above 0",
        ),
        (
            {"kind": "static", "prefill": 1, "decode": 1, "limits": {"max_requests": "many"}},
            "max_requests is 'many'",
        ),
    ],
)
def test_wrong_systems_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as failure:
        preset(settings.pop("kind"), **settings)
    assert words in str(failure.value)


def test_limits_of_goodput_are_above_zero() -> None:
    with pytest.raises(UserError, match="tpot_s"):
        LatencyLimits(tpot_s=0.0)


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_a_step_waits_for_the_kv_of_a_request_that_joins_it(plans_ahead: bool) -> None:
    costs = StepCosts(PROFILE)
    ends_s: dict[str, list[float]] = {}
    for handover in ("pull", "store"):
        limits = {"plans_ahead": plans_ahead}
        system = preset("static", prefill=1, decode=1, handover=handover, limits=limits)
        _, cluster = built(system)
        rows = ((0.0, 16, 60), (0.5, 1600, 2), (9.0, 1600, 2))
        cluster.run([SimRequest(number, *row) for number, row in enumerate(rows)])
        done = sorted(cluster.finished, key=lambda one: one.id)
        ends_s[handover] = [one.end_s - one.first_s for one in done]
    fetch_s = 1600 * costs.fetch_token_s
    alone_s, _ = costs.mixed_s(0, 0, 1, 1600)
    waited_s = overlapped_s(fetch_s, alone_s, 0.0, PROFILE.model.num_layers)
    assert ends_s["store"][2] == pytest.approx(waited_s)
    assert ends_s["pull"][2] == pytest.approx(fetch_s + alone_s, rel=1e-3)
    # The other stream waits for it, too, and not where KV is pulled beside the steps.
    assert ends_s["store"][0] - ends_s["pull"][0] == pytest.approx(waited_s - alone_s, rel=0.05)


def test_a_step_waits_for_the_kv_of_all_requests_that_join_it() -> None:
    _, cluster = built(preset("static", prefill=2, decode=1, handover="store"))
    taken_s = []

    def observe(start_s: float, took_s: float, steps: int, batch: int, tokens: int) -> None:
        if batch == 3:
            taken_s.append(took_s)

    cluster.find("d0")[1].engine.observe = observe
    rows = ((0.0, 16, 60), (0.5, 1600, 2), (0.5, 1600, 2))
    cluster.run([SimRequest(number, *row) for number, row in enumerate(rows)])
    step_s, _ = StepCosts(PROFILE).mixed_s(0, 0, 3, 3200)
    waited_s = overlapped_s(3200 * TOKEN_BYTES / 25e9, step_s, 0.0, PROFILE.model.num_layers)
    assert taken_s == pytest.approx([waited_s], rel=1e-3)
