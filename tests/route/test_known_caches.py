"""What is known of caches from events: blocks, hits, and how far they are believed."""

from __future__ import annotations

from random import Random

import pytest

from banaserve.base.types import RequestId
from banaserve_route.policies.caches.cache_view import CacheView, ViewFault
from banaserve_route.policies.caches.known_caches import CacheState, KnownCaches
from banaserve_route.policies.fleet import Fleet
from banaserve_route.policies.interface import (
    KnownHit,
    ReplicaId,
    Request,
    RoutingDecision,
    RoutingReason,
)
from banaserve_route.policies.prefixes.tree_policy import TreePolicy
from depth import seeds
from fleets import fleet_of
from kv_publisher import BLOCK, keys_of

A, B = ReplicaId("a"), ReplicaId("b")
TOKENS = list(range(100, 140))


def ask(tokens: list[int] = TOKENS, prompt: bytes = b"") -> Request:
    blocks = {BLOCK: keys_of(tokens[:-1])}
    return Request(RequestId("r"), len(tokens), prompt or bytes(len(tokens)), blocks=blocks)


def hold(
    view: CacheView, tokens: list[int], parent: bytes | None = None, medium: str = "GPU"
) -> list[bytes]:
    """Store ``tokens`` and return the hashes of their blocks."""
    hashes = [b"%d" % token for token in tokens[::BLOCK]]
    assert view.stored(hashes, parent, tokens, BLOCK, (), medium) is None
    return hashes


def known(*ids: ReplicaId) -> tuple[KnownCaches, list[CacheView]]:
    """Caches of replicas of which all is known: nothing is held."""
    caches = KnownCaches()
    views = [caches.add(one, 1)[0] for one in ids]
    for view in views:
        view.clear(is_whole=True)
    return caches, views


def test_equal_keys_mean_equal_prefixes() -> None:
    keys = keys_of(TOKENS)
    assert len(keys) == len(set(keys)) == len(TOKENS) // BLOCK
    assert keys_of(TOKENS[:17]) == keys[:4]
    assert keys_of(TOKENS[4:8], parent=keys[0]) == keys[1:2]
    # The second block is the same, the one before it is not.
    assert keys_of([9, *TOKENS[1:]])[1] != keys[1]
    salted = keys_of(TOKENS, extras=[["salt"]])
    assert not set(salted) & set(keys)
    assert keys_of(TOKENS, extras=[None, []]) == keys
    with pytest.raises(OverflowError):
        keys_of([2**31] * BLOCK)


def test_a_view_has_what_is_stored_and_not_removed() -> None:
    view = CacheView()
    hashes = hold(view, TOKENS[:12])
    hold(view, TOKENS[12:20], parent=hashes[-1])
    keys = keys_of(TOKENS)
    assert view.num_held(keys, {}) == 5
    assert view.num_held(keys, {keys[5]: 1}) == 6
    view.removed(hashes[1:2], "GPU")
    assert view.num_held(keys, {}) == 1
    view.check()


def test_a_block_in_two_memories_is_held_until_both_have_lost_it() -> None:
    view = CacheView()
    hashes = hold(view, TOKENS[:4])
    hold(view, TOKENS[:4], medium="CPU")
    view.removed(hashes, "GPU")
    assert view.num_held(keys_of(TOKENS), {}) == 1
    view.removed(hashes, "CPU")
    assert len(view) == 0
    view.check()


def test_blocks_that_cannot_be_placed_are_left_out() -> None:
    view = CacheView(max_blocks=3)
    view.clear(is_whole=True)
    hold(view, TOKENS[:8])
    cases = [
        (([b"x"], b"unknown", TOKENS[:4], 4), ViewFault.UNKNOWN_PARENT),
        (([b"x"], None, TOKENS[:5], 4), ViewFault.WRONG_SIZE),
        (([b"x"], None, TOKENS[:8], 8), ViewFault.WRONG_SIZE),
        (([b"x"], None, [], 0), ViewFault.WRONG_SIZE),
    ]
    for what, fault in cases:
        assert view.stored(*what, (), "GPU") is fault
    assert (len(view), view.is_whole) == (2, True)
    beyond = ([b"x", b"y"], None, TOKENS[20:28], 4)
    assert view.stored(*beyond, (), "GPU") is ViewFault.TOO_MANY_BLOCKS
    assert (len(view), view.is_whole) == (0, False)


@pytest.mark.parametrize("seed", seeds(20, 5))
def test_a_view_is_what_a_plain_set_of_prefixes_would_be(seed: int) -> None:
    draws, view = Random(seed), CacheView(max_blocks=64)
    held: dict[tuple[int, ...], set[str]] = {}
    for _ in range(300):
        medium = draws.choice(["GPU", "CPU"])
        prompt = tuple(draws.randrange(2) for _ in range(BLOCK * draws.randrange(1, 5)))
        prefixes = [prompt[: BLOCK * (1 + place)] for place in range(len(prompt) // BLOCK)]
        if draws.random() < 0.5 and len(held) < 60:
            view.stored([repr(one).encode() for one in prefixes], None, prompt, BLOCK, (), medium)
            for one in prefixes:
                held.setdefault(one, set()).add(medium)
        else:
            view.removed([repr(prompt).encode()], medium)
            held.get(prompt, set()).discard(medium)
            held = {one: media for one, media in held.items() if media}
        view.check()
        asked = [draws.randrange(2) for _ in range(4 * BLOCK)]
        hit = next((n for n in range(4) if tuple(asked[: BLOCK * (n + 1)]) not in held), 4)
        assert view.num_held(keys_of(asked), {}) == hit
    assert len(view) == len(held)


def test_hits_are_those_of_the_events_and_of_requests_on_their_way() -> None:
    caches, (first, _) = known(A, B)
    assert caches.hits(ask()) == {}  # the size of blocks is not known yet
    hold(first, TOKENS[:12])
    hits = caches.hits(ask())
    assert hits == {A: KnownHit(12, True)}
    fleet = fleet_of("predicted_latency", {"a": {}, "b": {}})
    fleet.caches = caches
    flight = fleet.sent(ask(), RoutingDecision(A, RoutingReason.TURN), 0.0)
    assert caches.hits(ask())[A].tokens == 36
    fleet.failed(flight, 1.0)
    assert caches.hits(ask())[A].tokens == 12
    fleet.remove(A)
    assert caches.hits(ask()) == {}


def test_ranks_count_by_their_mean() -> None:
    caches = KnownCaches()
    first, second = caches.add(A, 2)
    for view in (first, second):
        view.clear(is_whole=True)
    hold(first, TOKENS[:20])
    assert caches.hits(ask()) == {A: KnownHit(10, True)}
    second.clear(is_whole=False)
    assert caches.states() == {CacheState.ESTIMATED: 1}


def fleet_with(caches: KnownCaches) -> Fleet:
    fleet = fleet_of("predicted_latency", {"a": {}, "b": {}})
    fleet.caches = caches
    return fleet


@pytest.mark.parametrize("policy", ["predicted_latency", "cache_aware", "gorgo", "skywalker"])
def test_a_policy_sends_a_prompt_where_events_say_that_it_is(policy: str) -> None:
    caches, (_, second) = known(A, B)
    hold(second, TOKENS[:36])
    fleet = fleet_of(policy, {"a": {"reported_at_s": 0.0}, "b": {"reported_at_s": 0.0}})
    fleet.caches = caches
    request = fleet.with_known_hits(ask())
    decision = fleet.choose(request, 0.0)
    assert (decision.target, decision.hit_tokens) == (B, 36)


@pytest.mark.parametrize(("is_whole", "hit"), [(True, 4), (False, 40)])
def test_an_exact_view_replaces_the_estimate_and_another_one_raises_it(
    is_whole: bool, hit: int
) -> None:
    caches, (first, _) = known(A, B)
    fleet = fleet_with(caches)
    sent = fleet.sent(ask(), RoutingDecision(A, RoutingReason.TURN), 0.0)
    fleet.finished(sent, 1.0, 1)
    hashes = hold(first, TOKENS[:8])
    first.removed(hashes[1:], "GPU")
    first.is_whole = is_whole
    assert isinstance(fleet.policy, TreePolicy)
    assert fleet.policy.hits(fleet.with_known_hits(ask())) == {A: hit}


def serve(fleet: Fleet, request: Request, cached: int | None, first_s: float = 0.1) -> None:
    flight = fleet.sent(request, RoutingDecision(A, RoutingReason.TURN), 0.0)
    fleet.first_token(flight, first_s)
    fleet.finished(flight, first_s + 1, 5, cached)


@pytest.mark.parametrize(("held", "cached"), [(36, 0), (4, 36)])
def test_events_that_answers_contradict_are_not_believed_until_they_agree(
    held: int, cached: int
) -> None:
    caches, (first, _) = known(A, B)
    fleet = fleet_with(caches)
    hold(first, TOKENS[:held])
    for _ in range(3):
        serve(fleet, ask(), cached)
    assert caches.states()[CacheState.EXACT] == 2
    for _ in range(7):
        serve(fleet, ask(), cached)
    assert caches.states() == {CacheState.DISTRUSTED: 1, CacheState.EXACT: 1}
    assert A not in caches.hits(ask())
    for _ in range(20):
        serve(fleet, ask(), held)
    assert caches.states()[CacheState.EXACT] == 2
    assert caches.hits(ask())[A].tokens == held


def test_a_view_that_is_not_whole_may_be_exceeded() -> None:
    caches, (first, _) = known(A, B)
    hold(first, TOKENS[:8])
    first.is_whole = False
    for _ in range(20):
        serve(fleet_with(caches), ask(), 36)
    assert CacheState.DISTRUSTED not in caches.states()


@pytest.mark.parametrize(("first_s", "state"), [(0.4, "distrusted"), (0.02, "exact")])
def test_without_reported_hits_the_time_to_first_token_shows_them(
    first_s: float, state: str
) -> None:
    caches, (first, _) = known(A, B)
    fleet, hot = fleet_with(caches), list(range(4000))
    hold(first, hot[:3900])
    for number in range(30):
        cold = [-1 - number, *range(1000 + 100 * number)]
        serve(fleet, ask(cold), None, first_s=len(cold) * 1e-4)
    for _ in range(20):
        serve(fleet, ask(hot), None, first_s)
    assert caches.states()[CacheState(state)] >= 1
