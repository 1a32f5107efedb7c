"""What balancers tell each other of prefixes: enough to route by, bounded, and no prompt."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from banaserve.base.errors import ProtocolError
from banaserve.base.types import RequestId
from banaserve_route.policies.fleet import Fleet, Report
from banaserve_route.policies.interface import (
    Need,
    PeerView,
    ReplicaId,
    ReplicaView,
    Request,
    RoutingReason,
)
from banaserve_route.policies.prefixes import peers, snapshot
from banaserve_route.policies.prefixes.peers import (
    BLOCK_BYTES,
    MAX_SNAPSHOT_BYTES,
    PeerPrefixes,
    units_of,
)
from banaserve_route.policies.prefixes.snapshot import MAGIC
from banaserve_route.policies.prefixes.tree import TreeEntry
from banaserve_route.policies.registry import make

A, US, ASIA = (ReplicaId(name) for name in ("a", "region:us", "region:asia"))


def request(prompt: bytes, **more: Any) -> Request:
    return Request(RequestId("1"), max(1, len(prompt) // 4), prompt, **more)


def text(seed: int, length: int) -> bytes:
    return Random(seed).randbytes(length)


def told(*prompts: bytes, secret: str = "s") -> bytes:
    own = PeerPrefixes(secret)
    for prompt in prompts:
        own.sent(request(prompt), A)
    return own.snapshot()


def test_a_peer_s_prefixes_are_known_to_whole_blocks() -> None:
    prompt = text(1, 10 * BLOCK_BYTES + 7)
    here = PeerPrefixes("s")
    assert here.hits(request(prompt)) == {}
    assert here.take(US, told(prompt)) == 1
    whole = here.hits(request(prompt))[US]
    assert whole == pytest.approx(10 * BLOCK_BYTES / 4, abs=2)
    half = prompt[: 5 * BLOCK_BYTES + 100] + text(2, 5 * BLOCK_BYTES)
    assert here.hits(request(half))[US] == pytest.approx(5 * BLOCK_BYTES / 4, abs=2)
    assert here.hits(request(text(3, 3000))) == {}
    # A block says all that came before it: the same one elsewhere is no hit.
    assert here.hits(request(prompt[BLOCK_BYTES:])) == {}


def test_no_prompt_travels_and_another_secret_sees_nothing() -> None:
    prompt = b"a very private sentence. " * 200
    data = told(prompt)
    assert b"private" not in data
    other = PeerPrefixes("another")
    other.take(US, data)
    assert other.hits(request(prompt)) == {}


def test_requests_that_may_not_go_everywhere_are_not_told_of() -> None:
    own = PeerPrefixes("s")
    empty = own.snapshot()
    own.sent(request(text(1, 4096), allowed_regions=frozenset({"eu"})), A)
    own.sent(request(b"short"), A)
    assert own.snapshot() == empty


def test_what_a_peer_tells_replaces_what_it_told() -> None:
    first, second = text(1, 4096), text(2, 4096)
    here = PeerPrefixes("s")
    here.take(US, told(first))
    here.take(ASIA, told(first))
    here.take(US, told(second))
    assert set(here.hits(request(first))) == {ASIA}
    assert set(here.hits(request(second))) == {US}
    here.forget(US)
    assert here.hits(request(second)) == {}


def test_a_replica_that_is_gone_is_told_of_no_more() -> None:
    own = PeerPrefixes("s")
    empty = own.snapshot()
    own.sent(request(text(1, 4096)), A)
    own.snapshot()
    own.sent(request(text(2, 4096)), A)
    own.forget(A)
    assert own.snapshot() == empty


def test_memory_and_messages_are_bounded() -> None:
    own, here = PeerPrefixes("s"), PeerPrefixes("s")
    rng = Random(1)
    sizes = []
    for turn in range(6):
        for _ in range(300):
            own.sent(request(rng.randbytes(20_000)), ReplicaId(f"r{turn}"))
        assert own._news_bytes <= 1 << 20
        assert sum(len(start) for start, _ in own._news) == own._news_bytes
        data = own.snapshot()
        sizes.append(len(data))
        here.take(US, data)
        assert here._theirs.num_bytes <= peers.MAX_TREE_BYTES
    assert max(sizes) <= MAX_SNAPSHOT_BYTES + 1000
    assert own._told.num_bytes <= peers.MAX_TREE_BYTES


def test_of_a_long_prompt_the_start_is_told() -> None:
    prompt = text(1, 100_000)
    assert len(units_of(prompt, b"k")) // 8 == peers.MAX_PROMPT_BYTES // BLOCK_BYTES
    here = PeerPrefixes("s")
    here.take(US, told(prompt))
    assert here.hits(request(prompt))[US] == pytest.approx(32 * 1024 / 4, abs=2)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "ends early"),
        (b"bnpt9" + bytes(20), "another version"),
        (snapshot.encode([], 4, 100), "4-byte units"),
        (bytes(2 * MAX_SNAPSHOT_BYTES + 1), "bytes"),
        (MAGIC + b"\x08\0\0\xff\xff\xff\xff", "4294967295 entries"),
    ],
)
def test_a_hostile_snapshot_changes_nothing(data: bytes, words: str) -> None:
    prompt = text(1, 4096)
    here = PeerPrefixes("s")
    here.take(US, told(prompt))
    with pytest.raises(ProtocolError, match=words):
        here.take(US, data)
    assert set(here.hits(request(prompt))) == {US}


def test_a_deep_snapshot_that_stands_for_very_much_is_taken_in_part() -> None:
    entries = [TreeEntry(depth, bytes(8) * 8, {A: depth}) for depth in range(256)]
    entries += [
        TreeEntry(256, number.to_bytes(8, "big"), {A: 5000 + number}) for number in range(5000)
    ]
    here = PeerPrefixes("s")
    data = snapshot.encode(entries, 8, 10 * MAX_SNAPSHOT_BYTES)
    assert 0 < here.take(US, data) < 5000
    assert here._theirs.num_bytes <= peers.MAX_TREE_BYTES


def test_depth_is_bounded() -> None:
    entries = [TreeEntry(depth, bytes(8), {A: 1}) for depth in range(258)]
    with pytest.raises(ProtocolError, match="make no tree"):
        snapshot.decode(snapshot.encode(entries, 8, 1 << 30), 8)


def test_stamps_are_bounded_as_well() -> None:
    names = {ReplicaId(str(number)): 1 for number in range(4096)}
    entries = [TreeEntry(0, number.to_bytes(8, "big"), names) for number in range(20)]
    data = snapshot.encode(entries, 8, 1 << 30)
    with pytest.raises(ProtocolError, match="more than 65536 stamps"):
        snapshot.decode(data, 8)


def forwarded(preset: str, prompt: bytes) -> tuple[object, RoutingReason]:
    """Where skywalker sends what it cannot serve here, after ``us`` has told of ``prompt``."""
    policy: Any = make("skywalker", Random(1), preset=preset)
    fleet = Fleet(policy, "eu")
    fleet.add(ReplicaView(A, "eu"))
    for peer in (US, ASIA):
        fleet.add(PeerView(peer, peer))
        fleet.reported(peer, Report(1.0, num_available=1))
    fleet.reported(A, Report(1.0, pending=5))
    view = fleet.get(US)
    assert view is not None
    view.outstanding = 3  # so that the other one would be chosen
    if Need.PEER_PREFIXES in policy.needs:
        prefixes = PeerPrefixes("s")
        prefixes.take(US, told(prompt))
        policy.share_prefixes(prefixes)
    fleet.queue_length = 1
    decision = fleet.choose(request(prompt), 1.0)
    return decision.target, decision.reason


def test_skywalker_forwards_to_where_the_prefix_is() -> None:
    assert forwarded("repaired", text(1, 4096)) == (US, RoutingReason.FORWARDED)


@pytest.mark.parametrize("preset", ["published", "as-coded"])
def test_as_published_only_what_was_forwarded_counts(preset: str) -> None:
    assert forwarded(preset, text(1, 4096)) == (ASIA, RoutingReason.FORWARDED)
    policy = make("skywalker", Random(1), preset=preset)
    assert Need.PEER_PREFIXES not in policy.needs
