"""Round robin, least requests, the rotation among equals and the registry."""

from __future__ import annotations

import pytest

from banaserve.base.errors import UserError
from banaserve.base.types import (
    ClusterView,
    InstanceId,
    InstanceReport,
    InstanceView,
    RequestId,
    RequestView,
    Role,
)
from banaserve.orchestrator.control.routing.registry import make, names, register
from banaserve.orchestrator.control.routing.rotation import Rotation
from banaserve.orchestrator.control.routing.round_robin import RoundRobin

LONG = RequestView(RequestId("long"), 500)
SHORT = RequestView(RequestId("short"), 500, cached_tokens=500)


def view(name: str, *, requests: int = 0, running: int | None = None) -> InstanceView:
    """An instance whose first letter is its role; its report is two ticks of the clock old."""
    role = {"p": Role.PREFILL, "d": Role.DECODE, "c": Role.COLOCATED}[name[0]]
    said = None if running is None else InstanceReport(running, 0, 0.1, 0.1, at_s=8.0)
    return InstanceView(InstanceId(name), role, True, said, requests, 0, 1000.0)


def cluster(*views: InstanceView, now_s: float = 9.0) -> ClusterView:
    return ClusterView(now_s, {v.id: v for v in views})


def test_round_robin_turns_each_leg_on_its_own() -> None:
    policy = make("round_robin")
    here = cluster(view("p1"), view("p2"), view("d1"), view("d2"))
    routes = [policy.route(r, here) for r in (LONG, SHORT, LONG, SHORT)]
    assert [(r.prefill, r.decode) for r in routes] == [
        ("p1", "d1"),
        (None, "d2"),
        ("p2", "d1"),
        (None, "d2"),
    ]


def test_round_robin_goes_on_when_an_instance_leaves_and_comes_back() -> None:
    policy = make("round_robin")
    all_three = cluster(view("c1"), view("c2"), view("c3"))
    without_second = cluster(view("c1"), view("c3"))
    turns = [all_three, without_second, without_second, all_three, all_three, all_three]
    chosen = [policy.route(LONG, here).decode for here in turns]
    assert chosen == ["c1", "c3", "c1", "c2", "c3", "c1"]


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        ([view("c1", requests=2), view("c2", requests=1)], "c2"),
        # Others send there too: the report says more than the router's own count.
        ([view("c1", requests=2), view("c2", requests=1, running=3)], "c1"),
        # A report that lags behind takes nothing from the router's own count.
        ([view("c1", requests=2), view("c2", requests=3, running=0)], "c1"),
        ([view("c1", requests=1), view("c2", requests=1, running=1)], "c2"),
    ],
)
def test_least_requests(views: list[InstanceView], expected: str) -> None:
    assert make("least_requests").route(LONG, cluster(*views)).decode == expected


def test_least_requests_does_not_read_a_stale_report() -> None:
    here = cluster(view("c1", requests=2), view("c2", requests=1, running=3), now_s=20.0)
    assert make("least_requests").route(LONG, here).decode == "c2"


def test_least_requests_lets_equals_take_turns() -> None:
    policy = make("least_requests")
    here = cluster(view("p1"), view("p2"), view("d1"), view("d2"))
    routes = [policy.route(LONG, here) for _ in range(4)]
    assert [(r.prefill, r.decode) for r in routes] == [("p1", "d1"), ("p2", "d2")] * 2


def test_rotation_never_passes_over_an_instance() -> None:
    """Candidates that alternate between two pairs with one in common."""
    rotation = Rotation()
    a, b, c = view("c1"), view("c2"), view("c3")
    chosen = [
        rotation.take(rotation.order(pair)[0]).id for pair in [(a, b), (b, c), (a, b), (b, c)] * 2
    ]
    assert set(chosen) == {"c1", "c2", "c3"}


def test_start_is_taken_modulo_the_candidates() -> None:
    assert make("round_robin", start=5).route(LONG, cluster(view("c1"), view("c2"))).decode == "c2"


def test_names() -> None:
    assert {"least_requests", "load_aware", "round_robin"} <= set(names())


def test_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"known: least_requests, .*did you mean load_aware\?"):
        make("loadaware")


@pytest.mark.parametrize(
    ("policy", "option", "words"),
    [
        ("load_aware", "stale_after", "did you mean stale_after_s"),
        ("load_aware", "presets", "did you mean preset"),
        ("least_requests", "stale_s", "did you mean stale_after_s"),
        ("round_robin", "stale_after_s", "known: none"),
    ],
)
def test_unknown_option_names_the_nearest(policy: str, option: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(policy, **{option: 1})


def test_a_second_policy_of_a_name_is_refused() -> None:
    names()
    with pytest.raises(ValueError, match="round_robin"):
        register("round_robin")(RoundRobin)
