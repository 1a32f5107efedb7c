"""Streams leave overloaded simulated instances, by the decision of the server's rebalancer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from banaserve.orchestrator.control.costs.profile import load
from banaserve.orchestrator.control.rebalancing import RebalanceOptions
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.system import System, preset
from banaserve.sim.timeline import Timeline
from banaserve_bench.simulation.events import Event, arrange
from banaserve_bench.simulation.run import simulate
from banaserve_bench.simulation.workload import Lengths, LoadPhase, drawn
from depth import seeds
from engine_invariants import check_engine

PROFILE = load("opt-13b-a100")
BURST = LoadPhase(
    duration_s=4,
    rate_per_s=20,
    prompt=Lengths(kind="fixed", mean=100),
    output=Lengths(kind="fixed", mean=600),
)
LATE_S = 6.0
LATE = [Event(at_s=0.0, kind="kill", instance=name, back_after_s=LATE_S) for name in ("d1", "d2")]


def system(rebalances: bool) -> System:
    return preset("banaserve", prefill=1, decode=3, migration="still", rebalances=rebalances)


def test_a_burst_on_one_of_three_is_spread_within_five_seconds() -> None:
    timeline = Timeline()
    cluster = SimCluster(timeline, PROFILE, system(True))
    for event in LATE:
        arrange(event, cluster, timeline)
    counts: dict[str, int] = {}

    def count(_: Any) -> None:
        (cell,) = cluster.cells
        counts.update({n: one.inflight for n, one in cell.instances.items() if n != "p0"})

    timeline.at(LATE_S - 0.1, count)
    timeline.run(0.0)
    timeline.at(LATE_S + 5.0, count)
    requests = list(drawn([BURST], 0))
    cluster.run(requests)
    assert min(counts.values()) > 0
    assert max(counts.values()) <= 1.3 * sum(counts.values()) / 3
    assert len(cluster.finished) == len(requests)
    assert cluster.cells[0].num_rebalanced >= len(requests) // 2


def test_tokens_come_sooner_and_none_is_lost() -> None:
    kept, moved = (
        simulate(PROFILE, system(one), drawn([BURST], 0), events=LATE) for one in (False, True)
    )
    assert kept["num_rebalanced"] == 0
    assert moved["num_finished"] == kept["num_finished"] == kept["num_requests"]
    assert moved["total_s"] < kept["total_s"]
    assert moved["tpot_mean_s"] < kept["tpot_mean_s"]


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_whatever_dies_every_request_ends_and_none_moves_twice_at_once(seed: int) -> None:
    timeline = Timeline()
    cluster = SimCluster(timeline, PROFILE, system(True))
    (cell,) = cluster.cells
    for n, name in enumerate(("d0", "d1", "d2")):
        at_s = 2.0 * n + seed % 5
        kill = Event(at_s=at_s, kind="kill", instance=name, back_after_s=1.0 + seed % 3)
        arrange(kill, cluster, timeline)
    moves: dict[int, list[float]] = {}
    for instance in cell.instances.values():
        move_away = instance.engine.move_away

        def noted(request: Any, move_away: Any = move_away) -> None:
            moves.setdefault(request.id, []).append(timeline.now_s)
            move_away(request)

        instance.engine.move_away = noted  # type: ignore[method-assign]
    requests = list(drawn([BURST], seed))
    cluster.run(requests)
    assert len(cluster.finished) == len(requests)
    for one in cluster.finished:
        assert one.first_s <= one.end_s
    for instance in cell.instances.values():
        check_engine(instance.engine)
        assert instance.engine.used_tokens == instance.inflight == 0
    assert moves
    gaps = [after - at for times in moves.values() for at, after in pairwise(times)]
    assert all(gap >= RebalanceOptions().cooldown_s for gap in gaps)
