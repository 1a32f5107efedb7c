"""Preble: exploit or explore, its three costs, rebalancing, and the tree that they stand on."""

from __future__ import annotations

import sys
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banaserve.base.types import RequestId
from banaserve_route.policies.fleet import Fleet
from banaserve_route.policies.interface import (
    Flight,
    ReplicaId,
    ReplicaView,
    Request,
    RoutingDecision,
    RoutingReason,
)
from banaserve_route.policies.preble.costs import REGRESSIONS, WindowSum, mistral_7b_a6000
from banaserve_route.policies.preble.tree import CacheTree, common_bytes, key_node
from banaserve_route.policies.registry import make
from depth import num_examples

A, B, C = (ReplicaId(name) for name in "abc")
KEY = b"k" * 1000


def fleet_of(names: str = "ab", **section: Any) -> Fleet:
    defaults: dict[str, Any] = {"balance_after": 0, "regression": "monotone"}
    fleet = Fleet(make("preble", Random(1), **(defaults | section)))
    for name in names:
        fleet.add(ReplicaView(ReplicaId(name)))
    return fleet


def send(fleet: Fleet, prompt: bytes, target: ReplicaId, now_s: float = 0.0) -> Flight:
    """Sends ``prompt`` to ``target`` with the hits that the policy expects there."""
    hits = fleet.policy.tree.match(prompt, 1.0)  # type: ignore[attr-defined]
    hit_tokens = int(hits[target][0]) if target in hits else 0
    request = Request(RequestId("r"), len(prompt), prompt)
    return fleet.sent(request, RoutingDecision(target, RoutingReason.TURN, hit_tokens), now_s)


def serve(fleet: Fleet, prompt: bytes, target: ReplicaId, now_s: float = 0.0) -> None:
    fleet.finished(send(fleet, prompt, target, now_s), now_s + 0.1, 1)


def ask(fleet: Fleet, prompt: bytes, now_s: float = 1.0) -> RoutingDecision:
    return fleet.choose(Request(RequestId("q"), len(prompt), prompt), now_s)


@pytest.mark.parametrize(
    ("cached_on_a", "suffix", "target", "reason"),
    [
        # Matched 1000 against 999 that remain, and against 1000: equal explores.
        (KEY, 999, A, RoutingReason.PREFIX),
        (KEY, 1000, A, RoutingReason.EXPLORE),
        (KEY, 5000, A, RoutingReason.EXPLORE),
        (b"z" * 1000, 999, None, RoutingReason.EXPLORE),
    ],
)
def test_exploits_more_than_half(cached_on_a, suffix, target, reason):
    fleet = fleet_of()
    serve(fleet, cached_on_a, A)
    found = ask(fleet, KEY + b"s" * suffix)
    assert found.reason is reason
    if target is not None:
        assert found.target == target


def test_the_longest_match_wins_and_among_equals_the_cheaper():
    fleet = fleet_of("abc", balance_threshold=0)
    serve(fleet, KEY, A)
    serve(fleet, KEY + b"more of it" * 20, B)
    assert ask(fleet, KEY + b"more of it" * 20 + b"s").target == B
    serve(fleet, KEY + b"more of it" * 20, C)
    send(fleet, b"other" * 400, B)
    assert ask(fleet, KEY + b"more of it" * 20 + b"s").target == C


def test_the_costs_are_load_eviction_and_missed_tokens():
    fleet = fleet_of(regression="measured", prefill_ms_per_token=0.1, capacity_tokens=2000)
    serve(fleet, b"x" * 1500, A)
    serve(fleet, b"x" * 1500, A)
    found = ask(fleet, b"y" * 1000)
    # On b only the prompt; on a also the 1500 tokens that go, asked for by every request there.
    rate = fleet.policy.rates.prefill_ms  # type: ignore[attr-defined]
    assert found.scores_ms[B] == pytest.approx(1000 * rate)
    assert found.scores_ms[A] == pytest.approx(1000 * rate + 1500 * rate)
    send(fleet, b"z" * 10, B)
    loaded = ask(fleet, b"y" * 1000)
    assert loaded.scores_ms[B] > found.scores_ms[B]


def test_a_heavy_replica_s_requests_are_redirected_when_that_pays():
    fleet = fleet_of()
    serve(fleet, KEY, A)
    prompt = KEY + b"s" * 10
    for _ in range(3):
        send(fleet, prompt, A)
    assert ask(fleet, prompt).reason is RoutingReason.REBALANCED
    assert ask(fleet, prompt).target == B
    calm = fleet_of(balance_threshold=0)
    serve(calm, KEY, A)
    for _ in range(3):
        send(calm, prompt, A)
    assert ask(calm, prompt).target == A
    # 100,000 tokens to compute again are no bargain for three short requests.
    long = b"l" * 100_000
    serve(fleet, long, A, now_s=0.5)
    assert ask(fleet, long + b"s").target == A


def test_redirecting_waits_for_enough_requests():
    fleet = fleet_of(balance_after=50)
    serve(fleet, KEY, A)
    for _ in range(3):
        send(fleet, KEY + b"s", A)
    assert ask(fleet, KEY + b"s").target == A


def test_a_prefix_whose_queueing_time_doubled_gets_another_replica():
    fleet = fleet_of(balance_threshold=0, window_s=20.0, scales_hot_prefixes=True)
    for number in range(12):
        now_s = 0.5 * number if number < 6 else 10 + 0.5 * number
        flight = send(fleet, KEY + bytes([number]) * 8, A, now_s)
        fleet.first_token(flight, now_s + (0.3 if number < 6 else 0.9))
        fleet.finished(flight, now_s + 1, 1)
    assert ask(fleet, KEY + b"s", 17.0).target == B
    assert ask(fleet, KEY + b"s", 60.0).target == A


def test_a_hot_key_node_gives_half_of_its_subtree():
    fleet = fleet_of(balance_threshold=0, window_s=20.0, scales_hot_prefixes=True)
    for number in range(12):
        now_s = 0.5 * number if number < 6 else 10 + 0.5 * number
        flight = send(fleet, KEY + bytes([number % 4]) * 300, A, now_s)
        fleet.first_token(flight, now_s + (0.3 if number < 6 else 0.9))
        fleet.finished(flight, now_s + 1, 1)
    request = Request(RequestId("q"), 1001, KEY + b"s")
    fleet.sent(request, fleet.choose(request, 17.0), 17.0)
    tree = fleet.policy.tree  # type: ignore[attr-defined]
    tree.check()
    kept = [len(tree.match(KEY + bytes([one]) * 300, 1.0)) for one in range(4)]
    here = [tree.match(KEY + bytes([one]) * 300, 1.0)[A][0] == 1300 for one in range(4)]
    assert sum(here) == 2
    assert kept == [2] * 4
    # The times start anew: the next request is not moved as well.
    assert ask(fleet, KEY + b"t", 17.5).reason is RoutingReason.PREFIX


def test_a_key_node_has_more_tokens_than_all_before_it():
    tree = CacheTree(1, 10**6, 60.0)
    for prompt in (b"s" * 50 + b"t" * 200 + b"q", b"s" * 50 + b"t" * 200 + b"r", b"s" * 50 + b"u"):
        tree.add(prompt, 1.0, A, 0.0)

    def key_of(prompt: bytes) -> bytes:
        return key_node(tree.match(prompt, 1.0)[A][1]).label[:1]

    assert key_of(b"s" * 50 + b"t" * 200 + b"q") == b"t"
    assert key_of(b"s" * 50 + b"u") == b"s"


def test_published_load_remembers_what_is_done_and_repaired_load_does_not():
    for preset, target in (("published", B), ("repaired", None)):
        fleet = fleet_of(preset=preset, balance_threshold=0)
        for number in range(4):
            serve(fleet, bytes([number]) * 500, A, 0.0)
        scores = ask(fleet, b"new" * 100).scores_ms
        if target is B:
            assert scores[A] > scores[B] + 1000
            assert ask(fleet, b"new" * 100, 200.0).scores_ms[A] == pytest.approx(scores[B])
        else:
            assert scores[A] == pytest.approx(scores[B])


def test_an_explored_request_goes_where_prompts_are_cached():
    for decode_fraction, reason in (
        (0.7, RoutingReason.IMBALANCE),
        (0.9, RoutingReason.EXPLORE),
        (1.0, RoutingReason.EXPLORE),
    ):
        fleet = fleet_of(decode_fraction=decode_fraction)
        serve(fleet, KEY, A)
        for _ in range(4):
            send(fleet, KEY + b"s", A)
        # Of 5004 tokens 4000 were cached.
        assert ask(fleet, b"new" * 300).reason is reason
        assert ask(fleet, b"new" * 300, 40.0).reason is RoutingReason.EXPLORE


def test_only_the_heaviest_gives_and_only_the_lightest_takes():
    fleet = fleet_of("abc")
    serve(fleet, KEY, A)
    for _ in range(3):
        send(fleet, KEY + b"s", A)
    send(fleet, b"other" * 100, B)
    assert ask(fleet, KEY + b"t").target == C
    for _ in range(9):
        send(fleet, b"long" * 1000, B)
    assert ask(fleet, KEY + b"t").reason is RoutingReason.PREFIX


def test_the_regression_of_the_code_dips_and_the_repaired_one_does_not():
    assert mistral_7b_a6000(383, 0) < 0
    monotone = REGRESSIONS["monotone"]
    times = [monotone(tokens, 0) for tokens in range(2000)]
    assert times == sorted(times)
    assert monotone(4000, 0) == pytest.approx(mistral_7b_a6000(4000, 0))


def test_a_window_forgets_half_at_a_time():
    window = WindowSum(10.0)
    window.add(1, 1.0)
    window.add(1, 6.0)
    assert window.total(9.0) == 2
    assert window.total(11.0) == 1
    assert window.total(25.0) == 0


@pytest.mark.parametrize("unit_bytes", [1, 4])
def test_common_bytes(unit_bytes):
    one = bytes(range(250)) * 8
    for place in (0, 3, 511, 512, 1000, 1999):
        other = one[:place] + b"\xff" + one[place + 1 :]
        assert common_bytes(one, other, unit_bytes) == place - place % unit_bytes
    assert common_bytes(one, one[:777], unit_bytes) == 777 - 777 % unit_bytes
    assert common_bytes(b"", one, unit_bytes) == 0


operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "trim", "forget"]),
        st.lists(st.sampled_from([b"ab", b"ac", b"b", b"aaaab" * 9]), max_size=6).map(b"".join),
        st.sampled_from([A, B, C]),
        st.integers(0, 60),
    ),
    max_size=40,
)


@settings(max_examples=num_examples(60))
@given(happening=operations, capacity=st.sampled_from([1, 40, 120, 10**9]))
def test_the_tree_keeps_each_cache_within_its_capacity(happening, capacity):
    tree = CacheTree(1, capacity, 60.0)
    recorded: dict[ReplicaId, list[bytes]] = {A: [], B: [], C: []}
    for number, (what, prompt, target, tokens) in enumerate(happening):
        if what == "add":
            tree.add(prompt, 1.0, target, float(number))
            recorded[target].append(prompt)
        elif what == "forget":
            tree.forget(target)
            recorded[target] = []
            assert tree.used_tokens(target) == 0
        else:
            tree.trim(prompt, 1.0, target, tokens)
        tree.check()
        for one, prompts in recorded.items():
            longest = max((common_bytes(prompt, other, 1) for other in prompts), default=0)
            matched = tree.match(prompt, 1.0).get(one, (0.0, None))[0]
            assert matched <= longest
            if capacity == 10**9 and all(kind != "trim" for kind, *_ in happening):
                assert matched == pytest.approx(longest)


def test_what_would_be_evicted_is_evicted_leaves_used_longest_ago_first():
    tree = CacheTree(1, 100, 60.0)
    for number, prompt in enumerate((b"1" * 30, b"2" * 30, b"3" * 30, b"1" * 30)):
        tree.add(prompt, 1.0, A, float(number))
    assert [node.label[:1] for node in tree.would_evict(A, 50)] == [b"2", b"3"]
    tree.add(b"4" * 40, 1.0, A, 9.0)
    left = {prompt for prompt in (b"1", b"2", b"3", b"4") if tree.match(prompt * 30, 1.0)}
    assert left == {b"1", b"3", b"4"}
    assert tree.used_tokens(A) == 100


def test_trimming_goes_deeper_than_python_may_call_itself():
    tree = CacheTree(1, 10**6, 60.0)
    depth = sys.getrecursionlimit() + 100
    for length in range(1, depth + 1):
        tree.add(b"a" * length, 1.0, A, float(length))
    tree.trim(b"a" * depth, 1.0, A, 1)
    tree.check()
    assert tree.match(b"a" * depth, 1.0)[A][0] == 1
