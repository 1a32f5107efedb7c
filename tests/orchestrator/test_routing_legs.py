"""Which legs a request has, for every mixture of roles."""

from __future__ import annotations

import pytest

from banaserve.base.errors import NoInstanceError, UserError
from banaserve.base.types import ClusterView, InstanceId, InstanceView, RequestId, RequestView, Role
from banaserve.orchestrator.control.routing.legs import LegOptions, plan_legs
from banaserve.orchestrator.control.routing.registry import make, names


def cluster(words: str) -> ClusterView:
    """Instances by name, first letter the role; a trailing ! is one that is not ready."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "c": Role.COLOCATED}
    views = {}
    for word in words.split():
        name = InstanceId(word.rstrip("!"))
        views[name] = InstanceView(name, roles[word[0]], word[-1] != "!", None, 0, 0, 1000.0)
    return ClusterView(5.0, views)


def request(uncached: int) -> RequestView:
    return RequestView(RequestId("r"), 100, cached_tokens=100 - uncached)


@pytest.mark.parametrize(
    ("words", "uncached", "prefill", "decode", "reason"),
    [
        ("p1 d1 d2", 100, "p1", "d1 d2", "two_legs"),
        ("p1 p2! d1! d2", 100, "p1", "d2", "two_legs"),
        ("p1 d1", 33, "p1", "d1", "two_legs"),
        ("p1 d1", 32, "", "d1", "short_prompt"),
        ("p1 d1", 0, "", "d1", "short_prompt"),
        ("c1 c2 c3!", 100, "", "c1 c2", "colocated"),
        ("c1 c2", 0, "", "c1 c2", "colocated"),
        ("p1! c1 d1!", 100, "", "c1", "colocated"),
        ("p1! d1", 100, "", "d1", "fallback_no_prefill_instance"),
        ("p1! d1", 8, "", "d1", "short_prompt"),
        ("p1 p2 d1!", 100, "", "p1 p2", "fallback_no_decode_instance"),
        ("p1", 0, "", "p1", "fallback_no_decode_instance"),
        ("p1 c1 d1", 100, "c1 p1", "c1 d1", "two_legs"),
        ("p1 c1", 100, "c1 p1", "c1", "two_legs"),
        ("c1 d1", 100, "c1", "c1 d1", "two_legs"),
    ],
)
def test_legs(words: str, uncached: int, prefill: str, decode: str, reason: str) -> None:
    legs = plan_legs(request(uncached), cluster(words), LegOptions(skip_prefill_below_tokens=32))
    assert [view.id for view in legs.prefill] == prefill.split()
    assert [view.id for view in legs.decode] == decode.split()
    assert legs.reason == reason


@pytest.mark.parametrize("policy", names())
@pytest.mark.parametrize(
    ("words", "missing"),
    [("", "no prefill, decode or colocated"), ("p1! d1!", "no prefill, decode or colocated")],
)
def test_nobody_is_ready(policy: str, words: str, missing: str) -> None:
    with pytest.raises(NoInstanceError, match=missing):
        make(policy).route(request(100), cluster(words))


@pytest.mark.parametrize("policy", names())
@pytest.mark.parametrize(
    ("words", "missing"), [("p1 d1!", "no decode instance"), ("p1! d1", "no prefill instance")]
)
def test_without_fallback_the_missing_role_is_named(policy: str, words: str, missing: str) -> None:
    with pytest.raises(NoInstanceError, match=missing):
        make(policy, legs=LegOptions(fallback=False)).route(request(100), cluster(words))


def test_without_fallback_a_short_prompt_needs_no_prefill_instance() -> None:
    policy = make("round_robin", legs=LegOptions(fallback=False, skip_prefill_below_tokens=8))
    assert policy.route(request(8), cluster("p1! d1")).decode == "d1"


@pytest.mark.parametrize("policy", names())
def test_a_request_prefilled_on_a_colocated_instance_stays_there(policy: str) -> None:
    router = make(policy)
    routes = [router.route(request(100), cluster("c1 p1 d1")) for _ in range(2)]
    assert [(r.prefill, r.decode, r.reason) for r in routes] == [
        (None, "c1", "colocated"),
        ("p1", "d1", "two_legs"),
    ]


def test_negative_threshold() -> None:
    with pytest.raises(UserError, match="0 or more"):
        LegOptions(skip_prefill_below_tokens=-1)
