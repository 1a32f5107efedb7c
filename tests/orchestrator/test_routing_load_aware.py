"""Tables of decisions of `load_aware`: Algorithm 2 as published and repaired."""

from __future__ import annotations

from collections import Counter

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
from banaserve.orchestrator.control.routing.load_aware import (
    LoadAware,
    LoadAwareOptions,
    dispatch,
    least_loaded,
)
from banaserve.orchestrator.control.routing.registry import make

NOW_S = 100.0
PUBLISHED = LoadAwareOptions(preset="published")
REPAIRED = LoadAwareOptions(preset="repaired")


def report(
    running: int = 0, waiting: int = 0, kv: float = 0.0, busy: float = 0.0, age_s: float = 0.5
) -> InstanceReport:
    return InstanceReport(running, waiting, kv, busy, NOW_S - age_s)


def view(
    name: str,
    said: InstanceReport | None = None,
    *,
    requests: int = 0,
    tokens: int = 0,
    speed: float = 1000.0,
    role: Role = Role.PREFILL,
) -> InstanceView:
    return InstanceView(InstanceId(name), role, True, said, requests, tokens, speed)


def decode(name: str, said: InstanceReport | None = None, *, requests: int = 0) -> InstanceView:
    return view(name, said, requests=requests, role=Role.DECODE)


def batch(count: int, tokens: int = 100) -> list[RequestView]:
    return [RequestView(RequestId(f"r{i}"), tokens) for i in range(count)]


def placed(options: LoadAwareOptions, requests: list[RequestView], *views: InstanceView) -> str:
    """The instances of a batch, one letter a request."""
    return "".join(a.instance for a in dispatch(requests, views, NOW_S, options))


def test_published_sends_a_whole_batch_to_the_head_of_the_list() -> None:
    idle = report()
    views = [view("a", idle), view("b", idle), view("c", idle)]
    assert placed(PUBLISHED, batch(9), *views) == "aaaaaaaaa"
    assert placed(REPAIRED, batch(9), *views) == "abcabcabc"


def test_published_herds_on_one_queue_past_the_threshold() -> None:
    views = [
        view("a", report(waiting=3, kv=0.5, busy=0.9)),
        view("b", report(waiting=1, kv=0.6, busy=0.9)),
        view("c", report(waiting=2, kv=0.7, busy=0.9)),
    ]
    assert placed(PUBLISHED, batch(8), *views) == "bbbbbbbb"
    assert Counter(placed(REPAIRED, batch(9), *views)) == {"a": 2, "b": 4, "c": 3}


def test_published_fills_the_head_to_delta_l_first() -> None:
    views = [view("a", report(waiting=4)), view("b", report(waiting=1, busy=0.1))]
    options = LoadAwareOptions(preset="published", delta_l=0.3)
    assert placed(options, batch(6), *views) == "aaabbb"


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        ([view("a", report(busy=0.5)), view("b", report(kv=0.4))], "b"),
        ([view("a", report(waiting=2)), view("b", report(waiting=1))], "b"),
        # An instance that cannot be measured waits until none can.
        ([view("a"), view("b", report(busy=1.0))], "b"),
        ([view("a", report(age_s=9)), view("b", report(busy=1.0))], "b"),
        ([view("a", requests=2), view("b", requests=1)], "b"),
        # The router's own counts are not looked at.
        ([view("a", report(), tokens=9999, requests=9), view("b", report(busy=0.1))], "a"),
    ],
)
def test_published_choice(views: list[InstanceView], expected: str) -> None:
    assert placed(PUBLISHED, batch(1), *views) == expected


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        # Missed tokens ahead decide.
        ([view("a", report(), tokens=500, requests=1), view("b", report(), tokens=400)], "b"),
        # Seconds, not tokens: a is twice as fast.
        (
            [
                view("a", report(), tokens=500, requests=1, speed=2000.0),
                view("b", report(), tokens=400, requests=1),
            ],
            "a",
        ),
        # Compute and memory in the report do not: a prefill instance's KV leaves.
        ([view("a", report(kv=0.9, busy=1.0)), view("b", report(), tokens=1, requests=1)], "a"),
        # Somebody else's waiting requests count while the report is fresh ...
        ([view("a", report(waiting=2)), view("b", report(), tokens=150, requests=1)], "b"),
        ([view("a", report(waiting=1)), view("b", report(), tokens=150, requests=1)], "a"),
        # ... and are not read once it is stale.
        ([view("a", report(waiting=2, age_s=3)), view("b", report(), tokens=1, requests=1)], "a"),
        # The router's own requests are not counted a second time when they are reported.
        (
            [
                view("a", report(waiting=3), tokens=300, requests=3),
                view("b", report(), tokens=301, requests=3),
            ],
            "a",
        ),
        # Equal work: the shorter queue.
        ([view("a", report(), requests=2), view("b", report(), requests=1)], "b"),
        # Equal in everything: the one known to be alive.
        ([view("a", report(age_s=3)), view("b", report())], "b"),
        ([view("a"), view("b", report())], "b"),
        # Silence alone is no reason to pass over an instance with less work.
        ([view("a", report(age_s=3)), view("b", report(), tokens=1, requests=1)], "a"),
        # A speed that is not measured is taken from the others.
        (
            [
                view("a", report(), tokens=200, requests=1, speed=0.0),
                view("b", report(), tokens=300, requests=1),
            ],
            "a",
        ),
    ],
)
def test_repaired_choice(views: list[InstanceView], expected: str) -> None:
    assert placed(REPAIRED, batch(1), *views) == expected


def test_repaired_counts_missed_tokens_only() -> None:
    cached = RequestView(RequestId("cached"), 1000, cached_tokens=1000)
    long = RequestView(RequestId("long"), 500)
    views = [view("a", report()), view("b", report())]
    assert placed(REPAIRED, [long, cached, cached, cached], *views) == "abbb"


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        ([decode("a", report(running=2, kv=0.8)), decode("b", report(running=9, kv=0.4))], "b"),
        # Full memory with an idle processor is full: the maximum decides, not the sum.
        (
            [
                decode("a", report(running=1, kv=0.9)),
                decode("b", report(running=64, kv=0.6, busy=1.0)),
            ],
            "b",
        ),
        # Requests sent since the report are charged the mean share of the running ones: 0.1.
        (
            [
                decode("a", report(running=4, kv=0.4), requests=6),
                decode("b", report(running=5, kv=0.5), requests=5),
            ],
            "b",
        ),
        # Waiting ones too.
        (
            [
                decode("a", report(running=4, waiting=2, kv=0.4)),
                decode("b", report(running=5, kv=0.5)),
            ],
            "b",
        ),
        # A stale instance is priced by its peers: 3 * 0.1 against 0.4.
        (
            [
                decode("a", report(running=9, kv=0.9, age_s=3), requests=3),
                decode("b", report(running=4, kv=0.4), requests=4),
            ],
            "a",
        ),
        ([decode("a", requests=2), decode("b", requests=1)], "b"),
        ([decode("a"), decode("b", report())], "b"),
    ],
)
def test_decode_choice(views: list[InstanceView], expected: str) -> None:
    assert least_loaded(views, REPAIRED.model(views, NOW_S)).id == expected


def test_prefill_work_counts_where_one_instance_serves_both_legs() -> None:
    busy = view("a", report(kv=0.1), tokens=900, requests=1, role=Role.COLOCATED)
    full = view("b", report(running=3, kv=0.6), requests=3, role=Role.COLOCATED)
    cluster = ClusterView(NOW_S, {v.id: v for v in (busy, full)})
    route = make("load_aware").route(batch(1)[0], cluster)
    assert (route.prefill, route.decode, route.reason) == (None, "b", "colocated")


def test_equals_take_turns_on_both_legs() -> None:
    views = [view("p1", report()), view("p2", report()), decode("d1", report())]
    views += [decode("d2", report()), decode("d3", report())]
    cluster = ClusterView(NOW_S, {v.id: v for v in views})
    policy = make("load_aware")
    routes = [policy.route(request, cluster) for request in batch(6)]
    assert [r.prefill for r in routes] == ["p1", "p2"] * 3
    assert [r.decode for r in routes] == ["d1", "d2", "d3"] * 2
    shifted = make("load_aware", start=1).route(batch(1)[0], cluster)
    assert (shifted.prefill, shifted.decode) == ("p2", "d2")


def test_published_policy_applies_the_algorithm_to_colocated_instances() -> None:
    views = [
        view("a", report(busy=0.9), role=Role.COLOCATED),
        view("b", report(busy=0.1), requests=50, role=Role.COLOCATED),
    ]
    cluster = ClusterView(NOW_S, {v.id: v for v in views})
    assert make("load_aware", preset="published").route(batch(1)[0], cluster).decode == "b"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"preset": "fixed"}, "published or repaired"),
        ({"delta_l": 1.0}, "belongs to the preset published"),
        ({"preset": "published", "delta_l": 0.0}, "above 0"),
        ({"stale_after_s": 0.0}, "more than 0"),
        ({"max_running_requests": -1}, "more than 0"),
        ({"full_load_s": "a second"}, "full_load_s takes a number: got 'a second'"),
        ({"stale_after_s": float("nan")}, "stale_after_s takes a number: got nan"),
        ({"preset": "published", "delta_l": "high"}, "delta_l takes a number: got 'high'"),
    ],
)
def test_options_out_of_range(section: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make("load_aware", **section)


def test_empty_batch() -> None:
    assert dispatch([], [view("a")], NOW_S, REPAIRED) == []
    assert dispatch([], [view("a")], NOW_S, PUBLISHED) == []


def test_policy_is_registered_under_its_name() -> None:
    assert isinstance(make("load_aware"), LoadAware)
