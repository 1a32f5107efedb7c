"""Cells of several regions: no request is lost or ended twice, whatever dies."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from banaserve.base.errors import UserError
from banaserve.base.types import Distance, InstanceId
from banaserve.orchestrator.control.costs.profile import load as load_profile
from banaserve.orchestrator.control.routing.leg_by_leg import LegByLeg
from banaserve.orchestrator.control.routing.load_aware import LoadAware
from banaserve.sim.cluster.cell import Cell
from banaserve.sim.request import SimRequest
from banaserve.sim.system import preset
from banaserve.sim.timeline import Timeline
from banaserve_route.sim.cell_replica import far_between, nodes_of
from banaserve_route.sim.cells_load import CellsLoad
from banaserve_route.sim.cells_world import CellsSetting, CellsWorld, NodeDeath
from banaserve_route.sim.round_trips import FIVE_REGIONS, ROUND_TRIPS_MS, read_round_trips
from depth import seeds

pytestmark = pytest.mark.deep

PROFILE = load_profile("opt-13b-a100")
SMALL = CellsSetting(
    instances=120,
    cell_size=16,
    node_size=4,
    node_deaths=12,
    back_after_s=4.0,
    notice_s=1.0,
    load=CellsLoad(duration_s=6.0, rate_per_s=70.0),
)
TWO = CellsSetting(
    instances=32,
    regions=("europe", "us-east"),
    cell_size=8,
    node_size=8,
    node_deaths=0,
    back_after_s=8.0,
    notice_s=0.5,
    load=CellsLoad(duration_s=6.0, rate_per_s=20.0, swing_fraction=0.0),
)


def ran(setting: CellsSetting, seed: int) -> CellsWorld:
    world = CellsWorld(setting, PROFILE, seed)
    world.run()
    return world


def check(world: CellsWorld) -> None:
    """Every request has ended once, and nothing is left of any of them."""
    account = world.account()
    assert account.num_sent == account.num_ended > 0
    assert account.num_doubled == account.num_lost == 0
    for balancer in world.balancers.values():
        balancer.fleet.check()
        assert not balancer.queue
    for replica in (one for each in world.cells.values() for one in each):
        assert replica.num_jobs == replica.cell.load == 0
        for instance in replica.cell.instances.values():
            instance.engine.check()
            assert instance.engine.used_tokens == 0
            assert instance.inflight == instance.inflight_tokens == instance.coming == 0
            assert instance.inflight_prefill_tokens == 0


@pytest.mark.parametrize("seed", seeds(6, 6))
def test_nothing_is_lost_or_ended_twice_when_machines_die(seed):
    # Layouts by the seed too: machines of one instance up to whole cells, late and early notice.
    draws = Random(seed)
    setting = replace(
        SMALL,
        node_size=draws.choice((1, 3, 4, 16)),
        notice_s=draws.choice((0.0, 0.3, 2.5)),
        most_requests=draws.choice((2, 16)),
        migration=draws.choice(("still", "repaired", "published")),
    )
    world = ran(setting, seed)
    check(world)
    account = world.account()
    assert world.deaths
    assert account.num_restarted + account.num_sent_back > 0


def test_the_same_seed_gives_the_same_run_and_another_one_does_not():
    one, same, other = (ran(SMALL, seed).result() for seed in (1, 1, 2))
    assert one == same
    assert one != other


@pytest.mark.parametrize("policy", ["skywalker_ch", "gorgo", "gorgo_v1", "least_requests"])
def test_other_policies_lose_nothing_either(policy):
    check(ran(replace(SMALL, policy=policy, load=replace(SMALL.load, duration_s=2.0)), 3))


def test_a_region_without_a_living_cell_is_served_by_the_other_one(monkeypatch):
    module = "banaserve_route.sim.cells_world.drawn_deaths"
    deaths = [NodeDeath(2.0, "europe", cell, 0) for cell in (0, 1)]
    monkeypatch.setattr(module, lambda *_: deaths)
    world = ran(TWO, 1)
    check(world)
    assert world.balancers["europe"].num_forwarded > 20
    assert world.account().num_sent_back > 0
    assert world.balancers["us-east"].num_forwarded == 0


def test_without_deaths_a_region_keeps_its_requests():
    world = ran(TWO, 1)
    check(world)
    assert world.deaths == []
    assert sum(one.num_forwarded for one in world.balancers.values()) == 0
    assert world.account().num_restarted == 0


def test_a_full_region_sends_on():
    world = ran(replace(TWO, load=replace(TWO.load, swing_fraction=1.0), most_requests=1), 1)
    check(world)
    assert sum(one.num_forwarded for one in world.balancers.values()) > 0


NEAR = CellsSetting(
    instances=32,
    regions=("europe",),
    cell_size=32,
    node_size=8,
    node_deaths=0,
    migration="still",
)


@pytest.mark.parametrize(("rate_per_s", "most"), [(30.0, 0.01), (120.0, 0.05)])
def test_hand_overs_stay_on_their_machine_and_nobody_waits_for_that(monkeypatch, rate_per_s, most):
    load = CellsLoad(duration_s=10.0, rate_per_s=rate_per_s, swing_fraction=0.0)
    setting = replace(NEAR, load=load)
    near = ran(setting, 1).result()
    for name in ("as_good_prefill", "as_good_decode"):
        monkeypatch.setattr(LoadAware, name, getattr(LegByLeg, name))
    blind = ran(setting, 1).result()
    assert near["handed_far_fraction"] < most < 0.65 < blind["handed_far_fraction"]
    for name in ("ttft_p50_s", "ttft_p99_s"):
        assert near[name] < 1.03 * blind[name]
    for name in ("tpot_p50_s", "tpot_p99_s"):
        assert near[name] <= blind[name]


# ---- one cell


def cell_of(timeline: Timeline, between: Distance | None = None, node_size: int = 2) -> Cell:
    system = preset("banaserve", prefill=2, decode=2, cache="node", migration="still")
    nodes = nodes_of(system.roles(), node_size)
    far = far_between(nodes, between) if between is not None else None
    return Cell(timeline, PROFILE, system, system.roles(), None, 0, str, far=far, nodes=nodes)


def ended_s(between: Distance | None, node_size: int = 1) -> list[tuple[float, bool]]:
    """Returns of some requests how long each took, and whether it went to another machine."""
    timeline = Timeline()
    cell = cell_of(timeline, between, node_size)
    requests = [SimRequest(number, 0.0, 600, 20) for number in range(4)]
    for place, request in enumerate(requests):
        timeline.at(2.0 * place, cell.submit, request)
    timeline.run()
    return [
        (request.end_s - 2.0 * place, request.decode.id in request.prefill.far)
        for place, request in enumerate(requests)
    ]


@pytest.mark.parametrize(("node_size", "goes"), [(1, True), (2, False)])
def test_a_hand_over_between_machines_takes_what_the_way_takes(node_size, goes):
    # In their order p0, d0, p1, d1 two share a machine; prompts go from p0 to d0, from p1 to d1.
    slow = Distance(round_trip_s=0.05, bytes_per_s=1e9)
    near, far = ended_s(None), ended_s(slow, node_size)
    # The step that the request joins fetches it from the store of its own machine, near or far.
    longer_s = 600 * PROFILE.model.token_bytes / slow.bytes_per_s + slow.round_trip_s
    assert longer_s > 0.1
    for (near_s, _), (far_s, went) in zip(near, far, strict=True):
        assert went is goes
        assert far_s - near_s == pytest.approx(longer_s if goes else 0.0, abs=1e-9)


def test_a_way_that_is_not_measured_is_taken_for_a_near_one():
    timeline = Timeline()
    cell = cell_of(timeline)
    names = [*cell.instances]
    unmeasured = Cell(
        Timeline(),
        PROFILE,
        preset("banaserve", prefill=2, decode=2, cache="none", migration="still"),
        [(name, one.role) for name, one in cell.instances.items()],
        None,
        0,
        str,
        far={name: {other: None for other in names if other != name} for name in names},
    )
    request = SimRequest(0, 0.0, 600, 20)
    unmeasured.submit(request)
    unmeasured._timeline.run()
    assert request.end_s == pytest.approx(ended_s(None)[0][0])


def test_a_machine_comes_back_with_an_empty_cache_and_the_others_keep_theirs():
    timeline = Timeline()
    cell = cell_of(timeline)
    blocks = (1, 2)
    first, second = (cell.caches[InstanceId(name)] for name in ("p0", "p1"))
    assert cell.caches[InstanceId("d0")] is first is not second
    first.insert(blocks)
    second.insert(blocks)
    cell.kill_node([InstanceId("p0"), InstanceId("d0")], 5.0)
    assert first.lookup(blocks, 1024) == 0
    assert second.lookup(blocks, 1024) == 1023


@pytest.mark.parametrize("notice_s", [0.0, 2.0])
def test_until_a_death_is_noticed_requests_go_there_and_wait(notice_s):
    timeline = Timeline()
    cell = cell_of(timeline)
    requests = [SimRequest(number, 0.0, 100, 4) for number in range(4)]
    cell.kill_node([InstanceId("p0"), InstanceId("d0")], 10.0, notice_s)
    for request in requests:
        cell.submit(request)
    timeline.run(1.9)
    assert len(cell.finished) == (4 if not notice_s else 2)
    ready = {name for name, view in cell.view().instances.items() if view.ready}
    assert ready == ({"p1", "d1"} if not notice_s else {"p0", "d0", "p1", "d1"})
    timeline.run(9.0)
    assert sorted(request.id for request in cell.finished) == [0, 1, 2, 3]
    late = [request for request in cell.finished if request.end_s > 1.9]
    assert len(late) == (0 if not notice_s else 2)
    assert all(request.end_s > notice_s for request in late)


# ---- what is given


def test_measured_round_trips_are_read_and_the_built_in_ones_cover_every_pair(tmp_path):
    path = tmp_path / "rtt.csv"
    path.write_text(
        "src,dst,avg_rtt\naws:us-east-1,aws:us-west-2,60\naws:us-west-2,aws:us-east-1,64\n"
        "aws:us-east-1,aws:us-east-1,1\ngcp:x,aws:us-east-1,7\n"
    )
    assert read_round_trips(path, ("us-west", "us-east")) == {("us-east", "us-west"): 62.0}
    matrix = CellsSetting().matrix()
    assert {pair for pair in matrix if pair[0] != pair[1]} == {
        (one, other) for one in FIVE_REGIONS for other in FIVE_REGIONS if one != other
    }
    assert matrix["asia", "europe"] == ROUND_TRIPS_MS["europe", "asia"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("src,dst\n", "no column avg_rtt"),
        ("src,dst,avg_rtt\n", "no round trip from aws:us-east-1 to aws:us-west-2"),
        ("src,dst,avg_rtt\naws:us-east-1,aws:us-west-2,soon\n", "line 2: avg_rtt is 'soon'"),
        ("src,dst,avg_rtt\naws:us-east-1,aws:us-west-2,-1\n", "line 2: avg_rtt is '-1'"),
    ],
)
def test_a_wrong_file_of_round_trips_is_one_line(tmp_path, text, message):
    path = tmp_path / "rtt.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_round_trips(path, ("us-west", "us-east"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instances": 125}, "instances is 125"),
        ({"cell_size": 7}, "cell_size is 7"),
        ({"regions": ()}, "at least one"),
        ({"regions": ("asia", "asia"), "instances": 8}, "give each once"),
        ({"notice_s": 5.0, "back_after_s": 5.0}, "after its death has been noticed"),
        ({"node_size": 0}, "node_size"),
        ({"round_trips_ms": {}}, "no round trip between"),
        ({"policy": "nearest"}, "nearest"),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(changes, message):
    with pytest.raises(UserError, match=message):
        CellsWorld(replace(SMALL, **changes), PROFILE, 0)


@pytest.mark.parametrize(
    "changes", [{"rate_per_s": 0.0}, {"swing_fraction": 1.5}, {"num_prefixes": 0}]
)
def test_a_load_that_cannot_be_is_refused(changes):
    with pytest.raises(UserError, match=next(iter(changes))):
        replace(SMALL.load, **changes)
