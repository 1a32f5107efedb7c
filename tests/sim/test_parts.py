"""A cluster whose cells are dealt over several processes."""

from __future__ import annotations

from functools import partial

import pytest

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs import profile
from banaserve.sim.cluster.cluster import ClusterPart
from banaserve.sim.request import SimRequest
from banaserve.sim.system import preset
from banaserve_bench.simulation.parallel import dealt, simulate_in_parts
from banaserve_bench.simulation.run import simulate
from banaserve_bench.simulation.workload import Lengths, LoadPhase, drawn

PROFILE = profile.load("opt-13b-a100")
LENGTHS = Lengths(kind="lognormal", mean=120, high=400)
LOAD = partial(drawn, [LoadPhase(duration_s=10, rate_per_s=40, prompt=LENGTHS, output=LENGTHS)], 3)
SYSTEM = preset("banaserve", prefill=6, decode=6, cell_size=4, cache="none")


def test_one_process_is_the_usual_simulation() -> None:
    assert simulate_in_parts(PROFILE, SYSTEM, LOAD, 1) == simulate(PROFILE, SYSTEM, LOAD())


def test_parts_serve_every_request_once_and_the_same_twice() -> None:
    whole, parts = simulate(PROFILE, SYSTEM, LOAD()), simulate_in_parts(PROFILE, SYSTEM, LOAD, 2)
    assert parts == simulate_in_parts(PROFILE, SYSTEM, LOAD, 2)
    assert parts["num_requests"] == parts["num_finished"] == whole["num_finished"] > 300
    assert parts["output_tokens_per_s"] == pytest.approx(whole["output_tokens_per_s"], rel=0.05)
    assert parts["busy_fraction"] == pytest.approx(whole["busy_fraction"], rel=0.1)


def test_parts_are_what_their_cells_make_of_their_requests() -> None:
    """Three cells in three processes: each is a cluster of its own under a third of the load."""
    alone = [
        simulate(
            PROFILE,
            preset("banaserve", prefill=2, decode=2, cache="none"),
            dealt(LOAD(), ClusterPart(place, 3), 3),
        )
        for place in range(3)
    ]
    together = simulate_in_parts(PROFILE, SYSTEM, LOAD, 3)
    for name in ("num_requests", "num_finished", "num_preemptions"):
        assert together[name] == sum(one[name] for one in alone)
    assert together["total_s"] == max(one["total_s"] for one in alone)


@pytest.mark.parametrize("num_cells", [2, 5, 7])
def test_every_request_belongs_to_one_part_as_many_for_each_cell(num_cells: int) -> None:
    requests = [SimRequest(number, 0.0, 1, 1) for number in range(10 * num_cells)]
    parts = [
        [r.id for r in dealt(requests, ClusterPart(place, 2), num_cells)] for place in range(2)
    ]
    assert sorted(parts[0] + parts[1]) == list(range(10 * num_cells))
    assert [len(part) for part in parts] == [10 * ((num_cells + 1) // 2), 10 * (num_cells // 2)]


def test_what_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(UserError, match="4 processes for 3 cells: give 1 to 3"):
        simulate_in_parts(PROFILE, SYSTEM, LOAD, 4)
    shared = preset("banaserve", prefill=6, decode=6, cell_size=4)
    with pytest.raises(UserError, match="a store that all cells share"):
        simulate_in_parts(PROFILE, shared, LOAD, 2)


def test_a_process_that_breaks_is_told() -> None:
    def broken() -> list[SimRequest]:
        raise ValueError("no load")

    with pytest.raises(RuntimeError, match="ended without a result"):
        simulate_in_parts(PROFILE, SYSTEM, broken, 2)
