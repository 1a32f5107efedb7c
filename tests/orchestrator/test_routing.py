"""What holds for every routing policy on any cluster, and what the repair of Algorithm 2 buys."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banaserve.base.errors import NoInstanceError
from banaserve.base.types import (
    ClusterView,
    Distance,
    InstanceId,
    InstanceReport,
    InstanceView,
    RequestId,
    RequestView,
    Role,
    Route,
)
from banaserve.orchestrator.control.routing.load_aware import LoadAwareOptions, dispatch
from banaserve.orchestrator.control.routing.registry import make

NOW_S = 50.0
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("round_robin", {}),
    ("least_requests", {}),
    ("load_aware", {"preset": "repaired"}),
    ("load_aware", {"preset": "published"}),
]

fractions = st.floats(0, 1)
reports = st.builds(
    InstanceReport,
    num_running=st.integers(0, 200),
    num_waiting=st.integers(0, 200),
    kv_used_fraction=fractions,
    busy_fraction=fractions,
    at_s=st.floats(NOW_S - 5, NOW_S),
)


def instances(role: st.SearchStrategy[Role]) -> st.SearchStrategy[InstanceView]:
    return st.builds(
        InstanceView,
        id=st.integers(0, 30).map(lambda n: InstanceId(f"i{n}")),
        role=role,
        ready=st.booleans(),
        report=st.none() | reports,
        inflight_requests=st.integers(0, 100),
        inflight_prefill_tokens=st.integers(0, 100_000),
        prefill_tokens_per_s=st.just(0.0) | st.floats(1, 1e6),
    )


def cluster_of(views: list[InstanceView]) -> ClusterView:
    return ClusterView(NOW_S, {view.id: view for view in views})


clusters = st.lists(instances(st.sampled_from(Role)), max_size=8).map(cluster_of)
requests = st.builds(
    RequestView,
    id=st.just(RequestId("r")),
    prompt_tokens=st.integers(1, 50_000),
    cached_tokens=st.integers(0, 50_000),
)
policies = pytest.mark.parametrize(("name", "section"), POLICIES)


def answer(policy: Any, request: RequestView, cluster: ClusterView) -> Route | str:
    try:
        route: Route = policy.route(request, cluster)
    except NoInstanceError as error:
        return str(error)
    return route


@policies
@given(st.lists(st.tuples(requests, clusters), min_size=1, max_size=5))
def test_only_ready_instances_of_a_permitted_role_are_chosen(
    name: str, section: dict[str, Any], asked: list[tuple[RequestView, ClusterView]]
) -> None:
    policy = make(name, **section)
    for request, cluster in asked:
        route = answer(policy, request, cluster)
        ready = {view.role for view in cluster.instances.values() if view.ready}
        if isinstance(route, str):
            assert not ready
            continue
        decode = cluster.instances[route.decode]
        assert decode.ready
        if decode.role is Role.PREFILL:
            assert ready == {Role.PREFILL}
        if route.prefill is not None:
            prefill = cluster.instances[route.prefill]
            assert prefill.ready
            assert prefill.role is Role.PREFILL
            assert decode.role is not Role.PREFILL


@policies
@given(st.lists(st.tuples(requests, clusters), max_size=6), st.integers(0, 9))
def test_policies_built_and_asked_alike_answer_alike(
    name: str, section: dict[str, Any], asked: list[tuple[RequestView, ClusterView]], start: int
) -> None:
    one, other = (make(name, start=start, **section) for _ in range(2))
    for request, cluster in asked:
        turned = ClusterView(NOW_S, dict(reversed(cluster.instances.items())))
        assert answer(one, request, cluster) == answer(other, request, turned)


@given(
    st.lists(instances(st.just(Role.PREFILL)), min_size=1, max_size=8),
    st.integers(1, 60),
    st.integers(1, 4000),
    st.floats(1, 1e5),
)
def test_repaired_batch_never_herds(
    drawn: list[InstanceView], count: int, tokens: int, speed: float
) -> None:
    """An instance that got a request was no more loaded before its last one than any is after."""
    views = [replace(view, id=InstanceId(f"i{n}")) for n, view in enumerate(drawn)]
    views = [replace(view, prefill_tokens_per_s=speed) for view in views]
    options = LoadAwareOptions()
    batch = [RequestView(RequestId(f"r{n}"), tokens) for n in range(count)]
    got = Counter(a.instance for a in dispatch(batch, views, NOW_S, options))
    model = options.model(views, NOW_S)
    each_s = tokens / speed

    def ahead_s(view: InstanceView) -> float:
        """Of the view: missed tokens, and as many for each request of others, over the speed."""
        foreign_requests = model.queue_requests(view) - view.inflight_requests
        return (view.inflight_prefill_tokens + foreign_requests * tokens) / model.tokens_per_s(view)

    after_s = {view.id: ahead_s(view) + got[view.id] * each_s for view in views}
    least_s = min(after_s.values())
    assert sum(got.values()) == count
    for instance in got:
        assert after_s[instance] - each_s <= least_s * (1 + 1e-9)


@given(st.integers(1, 9), st.integers(1, 60), st.integers(0, 4000))
def test_repaired_batch_over_equals_differs_by_one_at_most(
    num_instances: int, count: int, tokens: int
) -> None:
    views = [
        InstanceView(InstanceId(f"i{n}"), Role.PREFILL, True, None, 0, 0, 777.0)
        for n in range(num_instances)
    ]
    batch = [RequestView(RequestId(f"r{n}"), tokens) for n in range(count)]
    got = Counter(a.instance for a in dispatch(batch, views, NOW_S, LoadAwareOptions()))
    per_instance = [got[view.id] for view in views]
    assert max(per_instance) - min(per_instance) <= 1


@pytest.mark.parametrize("live_counts", [False, True])
@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.COLOCATED,)])
@policies
@given(num_each=st.integers(1, 6), start=st.integers(0, 7), rounds=st.integers(1, 4))
def test_equal_load_starves_no_instance(
    name: str,
    section: dict[str, Any],
    roles: tuple[Role, ...],
    live_counts: bool,
    num_each: int,
    start: int,
    rounds: int,
) -> None:
    """Equal requests over equal instances: everybody gets the same number, within one.

    Both where nothing is counted (each request ends before the next) and where all stay.
    """
    said = InstanceReport(3, 1, 0.3, 0.5, NOW_S)
    views = {
        InstanceId(f"{role.value}{n}"): InstanceView(
            InstanceId(f"{role.value}{n}"), role, True, said, 4, 400, 1000.0
        )
        for role in roles
        for n in range(num_each)
    }
    policy = make(name, start=start, **section)
    got: Counter[InstanceId] = Counter()
    for _ in range(rounds * num_each):
        route = policy.route(RequestView(RequestId("r"), 100), ClusterView(NOW_S, views))
        for chosen in {route.prefill, route.decode} - {None}:
            got[chosen] += 1
            if live_counts:
                seen = views[chosen]
                views[chosen] = replace(
                    seen,
                    inflight_requests=seen.inflight_requests + 1,
                    inflight_prefill_tokens=seen.inflight_prefill_tokens + 100,
                )
    assert set(got.values()) == {rounds}
    assert len(got) == len(views)


ways = st.none() | st.builds(
    Distance, round_trip_s=st.floats(1e-6, 0.1), bytes_per_s=st.floats(1e6, 1e11)
)


@st.composite
def machines(draw: st.DrawFn) -> ClusterView:
    """A cluster over up to four machines, between which ways are as long as they like."""
    views = draw(st.lists(instances(st.sampled_from(Role)), min_size=1, max_size=10))
    by_id = {view.id: view for view in views}
    node_of = {name: draw(st.integers(0, 3)) for name in by_id}
    way_of = {(one, other): draw(ways) for one in range(4) for other in range(4)}
    found = {}
    for name, view in by_id.items():
        others = (other for other in by_id if node_of[other] != node_of[name])
        far = {other: way_of[node_of[name], node_of[other]] for other in others}
        found[name] = replace(view, far=far, kv_token_bytes=1000)
    return ClusterView(NOW_S, found)


@policies
@given(requests, machines())
def test_a_near_instance_wins_only_where_it_is_as_good(
    name: str, section: dict[str, Any], request: RequestView, cluster: ClusterView
) -> None:
    """Of one that knows no machines each choice differs by one request at most, or not at all."""
    blind = ClusterView(NOW_S, {n: replace(v, far={}) for n, v in cluster.instances.items()})
    near, usual = (answer(make(name, **section), request, one) for one in (cluster, blind))
    if isinstance(near, str) or isinstance(usual, str) or usual.prefill is None:
        assert near == usual
        return
    views = cluster.instances
    assert near.prefill is not None
    if name == "round_robin":
        assert near == usual
        return
    ready = [view for view in views.values() if view.ready]
    first = [view for view in ready if view.role is not Role.DECODE]
    second = [view for view in ready if view.role is not Role.PREFILL]
    one, other = views[near.prefill], views[usual.prefill]
    if section.get("preset") == "published":
        assert one is other
    else:
        assert queued(one, first) == queued(other, first)
    got, least = views[near.decode], views[usual.decode]
    model = LoadAwareOptions().model(second, NOW_S)

    def is_as_good(view: InstanceView) -> bool:
        if name == "least_requests":
            alike = model.present_requests(view) == model.present_requests(least)
            return alike and (model.report(view) is None) == (model.report(least) is None)
        return model.decode_load(view) <= model.decode_load(least) + model.request_share(least)

    assert is_as_good(got)
    if usual.decode not in other.far:
        assert near == usual
    elif near.decode in one.far:
        assert all(view.id in one.far for view in second if is_as_good(view))


def queued(view: InstanceView, candidates: list[InstanceView]) -> tuple[int, int]:
    """Requests and tokens ahead, which have to be equal where two are equally good."""
    model = LoadAwareOptions().model(candidates, NOW_S)
    return model.queue_requests(view), view.inflight_prefill_tokens
