"""Which instances are taken where some share a machine: the near one among those as good."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from banaserve.base.types import (
    ClusterView,
    Distance,
    InstanceId,
    InstanceReport,
    InstanceView,
    RequestId,
    RequestView,
    Role,
)
from banaserve.orchestrator.control.model.moving import UNMEASURED, way_s
from banaserve.orchestrator.control.routing.leg_by_leg import nearest
from banaserve.orchestrator.control.routing.registry import make

NOW_S = 10.0
FAST, SLOW = Distance(1e-4, 1e10), Distance(1e-3, 1e8)
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "c": Role.COLOCATED}


def seen(name: str, **changes: Any) -> InstanceView:
    running = changes.pop("running", 0)
    report = InstanceReport(running, 0, running / 100, 0.0, NOW_S)
    return InstanceView(
        InstanceId(name), ROLES[name[0]], True, report, running, 0, 1000.0, kv_token_bytes=1000
    )


def on(nodes: dict[str, list[InstanceView]], way: Distance | None = FAST) -> ClusterView:
    """Returns a cluster of machines that are all as far from each other."""
    views = {}
    for node, its in nodes.items():
        far = {one.id: way for other, those in nodes.items() if other != node for one in those}
        views.update({one.id: replace(one, far=far) for one in its})
    return ClusterView(NOW_S, views)


def routed(policy: Any, cluster: ClusterView, tokens: int = 100) -> str:
    route = policy.route(RequestView(RequestId("r"), tokens), cluster)
    return f"{route.prefill}>{route.decode}"


@pytest.mark.parametrize(
    ("source", "way", "wanted_s"),
    [
        ("far", FAST, 1e-4 + 500 * 1000 / 1e10),
        ("far", None, UNMEASURED.round_trip_s + 500 * 1000 / UNMEASURED.bytes_per_s),
        ("near", FAST, 0.0),
    ],
)
def test_a_way_takes_its_round_trip_and_the_bytes(
    source: str, way: Distance | None, wanted_s: float
) -> None:
    nodes = {"a": [seen("p0"), seen("d0")], "b": [seen("d1")]}
    views = on(nodes, way).instances
    target = views[InstanceId("d1" if source == "far" else "d0")]
    assert way_s(views[InstanceId("p0")], target, 500) == pytest.approx(wanted_s)


def test_where_all_are_equal_each_machine_takes_its_turn_and_keeps_its_hand_overs() -> None:
    cluster = on({"a": [seen("p0"), seen("d1")], "b": [seen("p1"), seen("d0")]})
    for name in ("load_aware", "least_requests"):
        policy = make(name)
        assert [routed(policy, cluster) for _ in range(4)] == ["p0>d1", "p1>d0"] * 2


@pytest.mark.parametrize(
    ("near", "far", "wanted"),
    [(5, 5, "p0>d0"), (6, 5, "p0>d0"), (7, 5, "p0>d1"), (2, 0, "p0>d1"), (1, 0, "p0>d0")],
)
def test_by_load_the_near_one_wins_while_it_has_one_request_more_at_most(
    near: int, far: int, wanted: str
) -> None:
    nodes = {"a": [seen("p0"), seen("d0", running=near)], "b": [seen("d1", running=far)]}
    assert routed(make("load_aware"), on(nodes)) == wanted


@pytest.mark.parametrize(("near", "wanted"), [(5, "p0>d0"), (6, "p0>d1")])
def test_by_requests_the_near_one_wins_among_equals_only(near: int, wanted: str) -> None:
    nodes = {"a": [seen("p0"), seen("d0", running=near)], "b": [seen("d1", running=5)]}
    assert routed(make("least_requests"), on(nodes)) == wanted


@pytest.mark.parametrize("name", ["load_aware", "least_requests"])
def test_a_burst_does_not_go_to_the_near_one_before_the_first_of_it_has_come(name: str) -> None:
    policy, views = make(name), {"a": [seen("p0"), seen("d0")], "b": [seen("d1")]}
    got = []
    for _ in range(6):
        got.append(routed(policy, on(views)).partition(">")[2])
        views = {
            node: [
                replace(one, coming_requests=one.coming_requests + (one.id == got[-1]))
                for one in its
            ]
            for node, its in views.items()
        }
    assert abs(got.count("d0") - got.count("d1")) <= 2


def test_a_prefill_instance_is_taken_where_one_that_decodes_is_near() -> None:
    nodes = {"a": [seen("p0")], "b": [seen("p1"), seen("d0")]}
    assert routed(make("load_aware"), on(nodes)) == "p1>d0"
    assert routed(make("load_aware", preset="published"), on(nodes)) == "p0>d0"
    busy = {"a": [seen("p0")], "b": [replace(seen("p1"), inflight_prefill_tokens=1), seen("d0")]}
    assert routed(make("load_aware"), on(busy)) == "p0>d0"


def test_round_robin_looks_at_no_machine() -> None:
    cluster = on({"a": [seen("p0"), seen("d1")], "b": [seen("p1"), seen("d0")]})
    policy = make("round_robin")
    assert [routed(policy, cluster) for _ in range(2)] == ["p0>d0", "p1>d1"]


def test_of_several_far_ones_the_one_with_the_shortest_way_is_taken() -> None:
    ways = {InstanceId("d0"): SLOW, InstanceId("d1"): FAST, InstanceId("d2"): None}
    first = replace(seen("p0"), far=ways)
    others = [seen("d2"), seen("d0"), seen("d1")]
    assert nearest([first], others, 1000)[1].id == "d1"
    assert nearest([first], others[:2], 1000)[1].id == "d2"  # 1 Gbit/s is 1.25e8 bytes a second


def test_an_instance_that_does_both_legs_hands_nothing_over() -> None:
    nodes = {"a": [seen("c0"), seen("d0", running=9)], "b": [seen("p0"), seen("d1", running=9)]}
    policy = make("load_aware")
    assert [routed(policy, on(nodes)) for _ in range(2)] == ["None>c0", "p0>c0"]


# ---- where times are predicted


def learnt(name: str, running: int = 0) -> InstanceView:
    """One whose steps take 10 ms and 1 ms for each request."""
    report = InstanceReport(
        running,
        0,
        running / 100,
        0.0,
        NOW_S,
        step_coefficients=(1e-2, 1e-4, 1e-9, 1e-9, 1e-3, 1e-3),
        fetch_token_s=1e-6,
    )
    return replace(
        seen(name), report=report, inflight_requests=running, inflight_tokens=100 * running
    )


@pytest.mark.parametrize(
    ("near", "way", "wanted"),
    [
        # 128 tokens of output at 1 ms for each request beside it, and what it costs that one.
        (0, FAST, "p0>d0"),
        (1, FAST, "p0>d1"),
        (1, Distance(1e-3, 1e6), "p0>d0"),
    ],
)
def test_by_times_the_near_one_wins_unless_waiting_there_costs_more_than_the_way(
    near: int, way: Distance, wanted: str
) -> None:
    nodes = {"a": [learnt("p0"), learnt("d0", near)], "b": [learnt("d1")]}
    assert routed(make("slo_aware"), on(nodes, way), 1000) == wanted


def test_what_is_predicted_has_the_way_in_it() -> None:
    nodes = {"a": [learnt("p0")], "b": [learnt("d0")]}
    tpot_s = []
    for way in (Distance(0.0, 1e12), Distance(0.05, 1e8)):
        request = RequestView(RequestId("r"), 1000, max_output_tokens=11)
        tpot_s.append(make("slo_aware").route(request, on(nodes, way)).tpot_s)
    fetch_s, sent_s = 1000 * 1e-6, 0.05 + 1000 * 1000 / 1e8
    assert tpot_s[1] - tpot_s[0] == pytest.approx((sent_s - fetch_s) / 10)
