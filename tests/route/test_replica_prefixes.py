"""Hand-written decisions of the policies that know where prompts were sent."""

from __future__ import annotations

from typing import Any

import pytest

from banaserve.base.types import RequestId
from banaserve_route.balancer.requests.routing_request import without_tried
from banaserve_route.policies.fleet import Fleet, Report
from banaserve_route.policies.interface import ReplicaId, Request, RoutingDecision, RoutingReason
from fleets import Views, fleet_of

SYSTEM = b"a system prompt of sixty-four characters, no more and no fewer.." * 2
NOW_S = 10.0


def request_of(prompt: bytes = b"", **what: Any) -> Request:
    given = {"id": RequestId("r"), "num_tokens": max(1, len(prompt)), "prompt": prompt}
    return Request(**(given | what))


def served(fleet: Fleet, prompt: bytes, target: str, cached_tokens: int | None = None) -> None:
    """Lets ``target`` serve ``prompt``, whatever the policy would have chosen."""
    decision = RoutingDecision(ReplicaId(target), RoutingReason.TURN, hit_tokens=len(prompt))
    flight = fleet.sent(request_of(prompt), decision, NOW_S)
    fleet.finished(flight, NOW_S, 1, cached_tokens)


def ask(fleet: Fleet, prompt: bytes = b"", **what: Any) -> tuple[str | None, RoutingReason, int]:
    decision = fleet.choose(request_of(prompt, **what), NOW_S)
    return decision.target, decision.reason, decision.hit_tokens


def told(pending: int = 0) -> dict[str, Any]:
    return {"pending": pending, "reported_at_s": NOW_S}


OPEN_PEER = {"num_available": 2, "queue_length": 0, "is_available": True}

SKYWALKER_CASES: list[tuple[str, dict[str, Any], Views, Views, int, str | None, RoutingReason]] = [
    (
        "a free replica",
        {},
        {"a": told(1), "b": told(0)},
        {"p": OPEN_PEER},
        0,
        "b",
        RoutingReason.EXPLORE,
    ),
    ("none is free", {}, {"a": told(1)}, {"p": OPEN_PEER}, 0, "p", RoutingReason.FORWARDED),
    ("no peer either", {}, {"a": told(1)}, {}, 0, None, RoutingReason.ALL_BUSY),
    (
        "a peer without a free replica",
        {},
        {"a": told(1)},
        {"p": OPEN_PEER | {"num_available": 0}},
        9,
        None,
        RoutingReason.ALL_BUSY,
    ),
    (
        "a peer's queue above tau",
        {},
        {"a": told(1)},
        {"p": OPEN_PEER | {"queue_length": 11}},
        99,
        None,
        RoutingReason.ALL_BUSY,
    ),
    (
        "a peer's queue above ours",
        {},
        {"a": told(1)},
        {"p": OPEN_PEER | {"queue_length": 3}},
        2,
        None,
        RoutingReason.ALL_BUSY,
    ),
    (
        "which the paper does not ask",
        {"preset": "published"},
        {"a": told(1)},
        {"p": OPEN_PEER | {"queue_length": 3}},
        2,
        "p",
        RoutingReason.FORWARDED,
    ),
    (
        "sixteen that the report cannot include",
        {},
        {"a": told(0) | {"sent_since_report": 16, "outstanding": 18}},
        {},
        0,
        None,
        RoutingReason.ALL_BUSY,
    ),
    (
        "which the code does not count",
        {"preset": "as-coded"},
        {"a": told(0) | {"sent_since_report": 16, "outstanding": 18}},
        {},
        0,
        "a",
        RoutingReason.EXPLORE,
    ),
    (
        "sixteen were sent, and one of them has ended",
        {},
        {"a": told(0) | {"sent_since_report": 16, "outstanding": 15}},
        {},
        0,
        "a",
        RoutingReason.EXPLORE,
    ),
    (
        "silent for longer than two seconds: by outstanding",
        {},
        {"a": {"pending": 5, "reported_at_s": NOW_S - 3, "outstanding": 9}},
        {},
        0,
        "a",
        RoutingReason.EXPLORE,
    ),
    (
        "never told: by outstanding",
        {},
        {"a": {"outstanding": 10}},
        {},
        0,
        None,
        RoutingReason.ALL_BUSY,
    ),
    (
        "pushing by outstanding ignores what is pending",
        {"push": "outstanding", "max_outstanding": 5},
        {"a": told(9) | {"outstanding": 4}},
        {},
        0,
        "a",
        RoutingReason.EXPLORE,
    ),
    (
        "blind pushing never waits",
        {"push": "blind"},
        {"a": told(9) | {"outstanding": 99}},
        {"p": OPEN_PEER},
        0,
        "a",
        RoutingReason.EXPLORE,
    ),
]


@pytest.mark.parametrize(
    ("section", "views", "peers", "queue", "target", "reason"),
    [case[1:] for case in SKYWALKER_CASES],
    ids=[case[0] for case in SKYWALKER_CASES],
)
@pytest.mark.parametrize("name", ["skywalker", "skywalker_ch"])
def test_skywalker_s_layers(name, section, views, peers, queue, target, reason):
    fleet = fleet_of(name, views, peers, **section)
    fleet.queue_length = queue
    found = ask(fleet, session="ann")
    if name == "skywalker_ch" and reason is RoutingReason.EXPLORE:
        reason = RoutingReason.SESSION
    assert found[:2] == (target, reason)


def test_a_burst_is_shared_with_a_region_of_four_places():
    """In the paper the 20 that have no place here go there at once, where 16 wait."""
    kept = {}
    for preset in ("repaired", "as-coded"):
        fleet = fleet_of(
            "skywalker",
            {"a": told()},
            {"p": OPEN_PEER | {"num_available": 1}},
            preset=preset,
            push="outstanding",
            max_outstanding=4,
        )
        targets = []
        for left in reversed(range(24)):
            fleet.queue_length = left
            decision = fleet.choose(request_of(), NOW_S)
            if decision.target is None:
                break
            fleet.sent(request_of(), decision, NOW_S)
            targets.append(decision.target)
        kept[preset] = (targets.count(ReplicaId("a")), targets.count(ReplicaId("p")))
    assert kept == {"repaired": (4, 11), "as-coded": (4, 20)}


def test_a_report_leaves_out_what_was_sent_after_it():
    fleet = fleet_of("skywalker", {"a": {}})
    for now_s in (1.0, 2.0, 3.0):
        fleet.sent(request_of(), RoutingDecision(ReplicaId("a"), RoutingReason.TURN), now_s)
    view = fleet.get(ReplicaId("a"))
    fleet.reported(ReplicaId("a"), Report(2.0))
    assert view.sent_since_report == 2
    fleet.reported(ReplicaId("a"), Report(3.5))
    assert view.sent_since_report == 0


def test_a_forwarded_request_waits_here_and_is_not_forwarded_again():
    fleet = fleet_of("skywalker", {"a": told(1)}, {"p": OPEN_PEER})
    assert ask(fleet, was_forwarded=True)[:2] == (None, RoutingReason.ALL_BUSY)
    fleet.reported(ReplicaId("a"), Report(NOW_S, pending=0))
    assert ask(fleet, was_forwarded=True)[0] == "a"


def test_no_traffic_goes_where_it_may_not_even_when_all_else_is_busy():
    fleet = fleet_of(
        "skywalker", {"a": told(1) | {"region": "us"}}, {"p": OPEN_PEER | {"region": "asia"}}
    )
    here = frozenset({"us", "eu"})
    assert ask(fleet, allowed_regions=here)[:2] == (None, RoutingReason.ALL_BUSY)
    assert ask(fleet)[0] == "p"


def test_skywalker_s_prefix_decides_above_half_and_only_among_the_free():
    fleet = fleet_of("skywalker", {"a": told(), "b": told(), "c": told()})
    served(fleet, SYSTEM, "b")
    assert ask(fleet, SYSTEM + b"x" * 60) == ("b", RoutingReason.PREFIX, 128)
    _, reason, _ = ask(fleet, SYSTEM + b"x" * 200)
    assert reason is RoutingReason.EXPLORE
    served(fleet, SYSTEM[:100], "c")
    fleet.reported(ReplicaId("b"), Report(NOW_S, pending=1))
    assert ask(fleet, SYSTEM) == ("c", RoutingReason.PREFIX, 100)


def test_who_was_asked_in_vain_is_not_asked_again_for_its_prefix():
    fleet = fleet_of("skywalker", {"a": told(), "b": told()})
    served(fleet, SYSTEM, "a")
    request, view = request_of(SYSTEM), fleet.view(NOW_S)
    assert fleet.policy.choose(request, view).target == "a"
    assert fleet.policy.choose(request, without_tried(view, {"a"})).target == "b"


def test_skywalker_knows_what_it_forwarded():
    fleet = fleet_of("skywalker", {"a": told(1)}, {"p": OPEN_PEER, "q": OPEN_PEER})
    served(fleet, SYSTEM, "q")
    assert ask(fleet, SYSTEM) == ("q", RoutingReason.FORWARDED, 128)


def test_equal_hits_go_where_less_is_outstanding():
    fleet = fleet_of("cache_aware", {"a": {"outstanding": 3}, "b": {"outstanding": 1}})
    served(fleet, SYSTEM, "a")
    served(fleet, SYSTEM, "b")
    assert ask(fleet, SYSTEM) == ("b", RoutingReason.PREFIX, 128)


@pytest.mark.parametrize(
    ("preset", "loads", "target", "reason"),
    [
        # 0.4: 50 % of the prompt, 32 apart and a hair's breadth in proportion.
        ("sglang-0.4", (32, 0), "a", RoutingReason.PREFIX),
        ("sglang-0.4", (33, 0), "b", RoutingReason.IMBALANCE),
        ("sglang-0.4", (333, 300), "b", RoutingReason.IMBALANCE),
        ("sglang-rust", (333, 300), "b", RoutingReason.IMBALANCE),
        ("sglang-rust", (329, 300), "a", RoutingReason.PREFIX),
        ("sglang-cli", (60, 0), "a", RoutingReason.PREFIX),
        ("sglang-cli", (465, 400), "a", RoutingReason.PREFIX),
        ("smg", (665, 400), "b", RoutingReason.IMBALANCE),
        ("repaired", (9, 0), "b", RoutingReason.IMBALANCE),
        ("repaired", (8, 0), "a", RoutingReason.PREFIX),
    ],
)
def test_cache_aware_s_sets_of_defaults(preset, loads, target, reason):
    views: Views = {name: {"outstanding": load} for name, load in zip("ab", loads, strict=True)}
    fleet = fleet_of("cache_aware", views, preset=preset)
    served(fleet, SYSTEM, "a")
    assert ask(fleet, SYSTEM)[:2] == (target, reason)


@pytest.mark.parametrize(("preset", "target"), [("sglang-cli", "b"), ("smg", "a")])
def test_without_a_hit_the_smallest_tree_or_the_least_loaded(preset, target):
    fleet = fleet_of("cache_aware", {"a": {}, "b": {"outstanding": 5}}, preset=preset)
    served(fleet, b"something else", "a")
    assert ask(fleet, SYSTEM)[:2] == (target, RoutingReason.EXPLORE)


BLOCK = b"x" * 64


@pytest.mark.parametrize(
    ("loads", "target", "reason"),
    [
        # The mean of 1, 1, 5 is 2.3, the deviation 1.9: within two deviations, not within one.
        ((5, 1, 1), "a", RoutingReason.PREFIX),
        # 9 apart: only the least loaded compete, and b has one block of the two.
        ((9, 0, 0), "b", RoutingReason.IMBALANCE),
        ((9, 1, 0), "c", RoutingReason.LEAST_LOADED),
    ],
)
def test_prefix_cache_in_aibrix_s_form(loads, target, reason):
    views: Views = {name: {"outstanding": load} for name, load in zip("abc", loads, strict=True)}
    fleet = fleet_of("prefix_cache", views)
    served(fleet, BLOCK + SYSTEM[:64], "a")
    served(fleet, BLOCK, "b")
    assert ask(fleet, BLOCK + SYSTEM[:64])[:2] == (target, reason)


def test_prefix_cache_passes_over_a_replica_beyond_the_deviations():
    fleet = fleet_of("prefix_cache", {"a": {"outstanding": 5}, "b": {}, "c": {}}, deviations=1)
    served(fleet, BLOCK, "a")
    target, reason, hit_tokens = ask(fleet, BLOCK)
    assert target in ("b", "c")
    assert (reason, hit_tokens) == (RoutingReason.LEAST_LOADED, 0)


def test_prefix_cache_looks_at_whole_chained_blocks_for_their_lifetime():
    fleet = fleet_of("prefix_cache", {"a": {}, "b": {"outstanding": 1}})
    served(fleet, BLOCK + BLOCK, "b")
    assert ask(fleet, BLOCK + BLOCK[:63]) == ("b", RoutingReason.PREFIX, 64)
    # The second block is the same, what goes before it is not.
    assert ask(fleet, SYSTEM[:64] + BLOCK)[:2] == ("a", RoutingReason.LEAST_LOADED)
    late = fleet.choose(request_of(BLOCK + BLOCK), NOW_S + 1201)
    assert late.reason is RoutingReason.LEAST_LOADED


def test_what_a_replica_did_not_have_is_forgotten():
    fleet = fleet_of("cache_aware", {"a": {}, "b": {}})
    served(fleet, SYSTEM + b"one", "a")
    served(fleet, SYSTEM + b"two", "a", cached_tokens=10)
    assert ask(fleet, SYSTEM + b"one")[2] == 128
    fleet_that_trusts = fleet_of("cache_aware", {"a": {}, "b": {}}, trims=False)
    served(fleet_that_trusts, SYSTEM + b"one", "a")
    served(fleet_that_trusts, SYSTEM + b"two", "a", cached_tokens=10)
    assert ask(fleet_that_trusts, SYSTEM + b"one")[2] == 131


def test_a_replica_that_restarted_has_nothing():
    fleet = fleet_of("skywalker", {"a": told(), "b": told()})
    served(fleet, SYSTEM, "a")
    fleet.restarted(ReplicaId("a"))
    assert ask(fleet, SYSTEM)[1:] == (RoutingReason.EXPLORE, 0)


@pytest.mark.parametrize(
    ("section", "a", "b", "target"),
    [
        # The greatest share decides: a full memory, a full batch, or a second of prefill.
        ({}, {"kv_used_fraction": 0.9}, {"uncached_tokens": 5000}, "b"),
        ({}, {"kv_used_fraction": 0.3}, {"uncached_tokens": 5000}, "a"),
        ({}, {"outstanding": 64}, {"kv_used_fraction": 0.4, "running": 1}, "b"),
        ({}, {"round_trip_ms": 150.0}, {"uncached_tokens": 1000}, "b"),
        # What was sent since the report takes the share of those that run.
        (
            {},
            {"kv_used_fraction": 0.4, "running": 4, "outstanding": 8},
            {"kv_used_fraction": 0.6, "running": 4, "outstanding": 4},
            "b",
        ),
        # Published: reports alone; at 0.9 + 64/128 = 1.4 past the threshold of 1.3, queues.
        (
            {"preset": "published"},
            {"kv_used_fraction": 0.9, "running": 64, "pending": 3},
            {"kv_used_fraction": 0.95, "running": 64, "pending": 1},
            "b",
        ),
        (
            {"preset": "published"},
            {"kv_used_fraction": 0.5, "pending": 3, "uncached_tokens": 9000},
            {"kv_used_fraction": 0.6},
            "a",
        ),
    ],
)
def test_load_aware(section, a, b, target):
    assert ask(fleet_of("load_aware", {"a": a, "b": b}, **section))[0] == target
