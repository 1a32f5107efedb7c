"""Snapshots for the page: instances, modules away, moves, figures and the store."""

from __future__ import annotations

import pytest

from banaserve.base.types import ObservedRequest
from banaserve.contracts.control_api import (
    ControllerState,
    ControllerStatus,
    InstanceStatus,
    MoveLine,
    ServerStatus,
)
from banaserve.contracts.migration_api import (
    ContextModules,
    ExpertsModules,
    HeadsModules,
    LayersModules,
    Migration,
    MoveStatus,
)
from banaserve.frontdoor.page.records import MoveProgress, ShownLayers
from banaserve.frontdoor.page.snapshot import (
    WINDOW_S,
    figures_of,
    migration_progress,
    modules_away,
    quantile,
    snapshot_of,
    spans_of,
    store_panel,
)
from banaserve.kvstore.stats import StoreStats, TierReport
from banaserve.kvstore.tiers.interface import TierStats

CONTROLLER = ControllerStatus(ControllerState.RUNNING, "on", "repaired", 2.0)
NOW_S = 1000.0


def instance(name: str, **seen: object) -> InstanceStatus:
    return InstanceStatus(name, "decode", "ready", 1, 0, **seen)  # type: ignore[arg-type]


def request(arrival: float, first: float | None, end: float | None, tokens: int) -> ObservedRequest:
    return ObservedRequest(arrival, 10, 0, tokens, None, first, end)


@pytest.mark.parametrize("num_instances", [1, 64])
def test_a_snapshot_of_a_server(num_instances):
    names = [f"d{i}" for i in range(num_instances)]
    status = ServerStatus(
        1.7e9,
        [instance(one, compute=0.5, memory=0.25, num_running=3, num_waiting=1) for one in names],
        [MoveLine("m1", "d0 to p0: layers", "running"), MoveLine("r1", "d1 to prefill", "done")],
        CONTROLLER,
        "load_aware",
    )
    units = [modules_away(LayersModules(4, 8), "p0", "layers 4:8")]
    moves = [MoveStatus("m1.0", "u", "layers 8:12", "p0", "copying", {"copying": 2.0}, {})]
    moves[0].facts = {"precopy_bytes": 100, "weight_bytes": 20, "planned_bytes": 260}
    migration = Migration("m1", "layers", "d0", "p0", "running", moves, predicted_bytes=400)
    found = snapshot_of(
        status,
        (30, 3),
        {"d0": units},
        [migration],
        {"m1": [LayersModules(8, 12)]},
        [],
        NOW_S,
        None,
        [],
        0.75,
    )
    assert [one.status.id for one in found.instances] == names
    assert found.instances[0].away == units
    assert all(not one.away for one in found.instances[1:])
    assert found.moves == [
        MoveProgress(
            "m1",
            "layers",
            "running",
            "layers 8:12",
            "d0",
            "p0",
            "copying",
            2.0,
            120,
            280,
            400,
            spans=[ShownLayers(8, 12)],
        ),
        MoveProgress("r1", "other", "done", "d1 to prefill"),
    ]
    figures = found.figures
    assert (figures.num_running, figures.num_waiting) == (3 * num_instances, num_instances)
    assert (figures.kv_mean_fraction, figures.compute_mean_fraction) == (0.25, 0.5)
    assert (figures.cpu_fraction, figures.gpu_fraction, figures.ttft_p50_s) == (0.75, None, None)
    assert (found.num_layers, found.num_kv_heads, found.store) == (30, 3, None)


def test_of_moves_that_have_ended_only_the_last_are_shown():
    ended = [Migration(f"m{i}", "layers", "d0", "p0", "done", []) for i in range(20)]
    under_way = Migration("m20", "layers", "d0", "p0", "waiting", [])
    status = ServerStatus(1.7e9, [], [], CONTROLLER)
    found = snapshot_of(status, (0, 0), {}, [*ended, under_way], {}, [], 0.0, None, [])
    assert [one.id for one in found.moves] == ["m20", *(f"m{i}" for i in range(12, 20))]


def test_how_many_bytes_travel_is_known_once_all_copies_have_begun():
    moves = [MoveStatus(f"m1.{i}", "u", "layers", "p0", "copying") for i in range(2)]
    migration = Migration("m1", "layers", "d0", "p0", "running", moves, predicted_bytes=400)
    moves[0].facts = {"precopy_bytes": 60, "planned_bytes": 80}
    found = migration_progress(migration, [])
    assert (found.num_bytes, found.total_bytes, found.predicted_bytes) == (60, 0, 400)
    moves[1].facts = {"weight_bytes": 10, "planned_bytes": 0}
    assert migration_progress(migration, []).total_bytes == 90


@pytest.mark.parametrize(
    ("modules", "kind", "spans"),
    [
        (LayersModules(3, 9), "layers", [ShownLayers(3, 9)]),
        (ContextModules(0, 30), "context", [ShownLayers(0, 30)]),
        (
            ExpertsModules([(7, [0]), (5, [1, 2])]),
            "experts",
            [ShownLayers(5, 6), ShownLayers(7, 8)],
        ),
        (HeadsModules([(5, [1]), (6, [1]), (7, [1])]), "heads", [ShownLayers(5, 8, [1])]),
        (
            HeadsModules([(7, [0]), (5, [1, 2]), (6, [1])]),
            "heads",
            [ShownLayers(5, 6, [1, 2]), ShownLayers(6, 7, [1]), ShownLayers(7, 8, [0])],
        ),
        (
            HeadsModules([(5, [1]), (9, [1])]),
            "heads",
            [ShownLayers(5, 6, [1]), ShownLayers(9, 10, [1])],
        ),
    ],
)
def test_modules_are_spans_of_layers(modules, kind, spans):
    assert spans_of(modules) == spans
    assert modules_away(modules, "p0", "words").kind == kind


def test_figures_are_of_the_last_seconds():
    old_s, new_s = NOW_S - WINDOW_S - 10, NOW_S - 10
    requests = [
        request(old_s - 5, old_s, old_s + 1, 100),  # over by then
        request(new_s - 0.5, new_s, new_s + 2, 21),
        request(new_s, new_s + 0.25, None, 1),
        request(NOW_S - 1, None, None, 0),
    ]
    found = figures_of([], requests, NOW_S)
    assert (found.ttft_p50_s, found.ttft_p99_s) == (0.5, 0.5)
    assert found.tpot_p50_s == pytest.approx(0.1)
    assert found.tokens_per_s == pytest.approx(22 / WINDOW_S)
    assert found.requests_per_s == pytest.approx(3 / WINDOW_S)


def test_a_long_request_counts_with_the_tokens_of_the_window():
    began_s = NOW_S - 2 * WINDOW_S
    found = figures_of([], [request(began_s, began_s, None, 601)], NOW_S)
    assert found.tokens_per_s == pytest.approx(300 / WINDOW_S)
    assert found.ttft_p50_s is None


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [
        ((), 0.5, None),
        ((3.0,), 0.99, 3.0),
        ((4.0, 1.0, 3.0, 2.0), 0.5, 3.0),
        ((1.0, 2.0), 0.0, 1.0),
    ],
)
def test_quantiles(values, fraction, expected):
    assert quantile(values, fraction) == expected


def test_the_store_and_its_tiers():
    tier = TierStats(
        name="ssd",
        available=False,
        capacity_bytes=1 << 30,
        used_bytes=1 << 20,
        num_blocks=7,
        stores=9,
        stored_bytes=9,
        loads=5,
        loaded_bytes=5,
        evictions=2,
        missing=0,
        corrupt=0,
        failures=1,
        in_flight=0,
        load_bytes_per_s=0.0,
        store_bytes_per_s=0.0,
        problem="the disk is full",
    )
    counters = dict.fromkeys(StoreStats.__struct_fields__, 0)
    given = {**counters, "hits": 30, "misses": 10, "used_slots": 4, "capacity_bytes": 1 << 28}
    given |= {"asked_blocks": 8, "found_blocks": 2}  # hits are hand-overs too
    given["tiers"] = (TierReport(stats=tier, promoted=3),)  # type: ignore[assignment]
    panel = store_panel(StoreStats(**given))  # type: ignore[arg-type]
    assert (panel.hits, panel.misses) == (2, 6)
    assert [(one.name, one.num_blocks, one.hits, one.problem) for one in panel.levels] == [
        ("memory", 4, 30, ""),
        ("ssd", 7, 3, "the disk is full"),
    ]
