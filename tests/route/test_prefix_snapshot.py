"""Snapshots of a prefix tree say what the tree says, and nothing hostile gets in."""

from __future__ import annotations

import struct
from random import Random

import pytest

from banaserve.base.errors import ProtocolError
from banaserve_route.policies.interface import ReplicaId
from banaserve_route.policies.prefixes import snapshot
from banaserve_route.policies.prefixes.snapshot import decode, encode, load
from banaserve_route.policies.prefixes.tree import PrefixTree, make_tree
from depth import seeds

A, B = ReplicaId("a"), ReplicaId("b")
ROOMY = 1 << 30


def filled(seed: int, count: int) -> tuple[PrefixTree, list[bytes]]:
    rng = Random(seed)
    heads = [rng.randbytes(40) for _ in range(5)]
    prompts = [rng.choice(heads) + rng.randbytes(rng.randrange(60)) for _ in range(count)]
    tree = make_tree(1, ROOMY, ROOMY)
    for prompt in prompts:
        tree.add(prompt, rng.choice([A, B]))
    return tree, prompts


@pytest.mark.parametrize("seed", seeds(3, 3))
def test_a_tree_comes_back_as_it_was(seed):
    tree, prompts = filled(seed, 200)
    data = encode(tree.dump(), 1, ROOMY)
    again = make_tree(1, ROOMY, ROOMY)
    load(again, decode(data, 1))
    for prompt in prompts:
        assert again.match(prompt) == tree.match(prompt)
    assert again.num_nodes == tree.num_nodes


def test_a_peer_s_replicas_become_the_peer():
    tree, prompts = filled(1, 50)
    again = make_tree(1, ROOMY, ROOMY)
    load(again, decode(encode(tree.dump(), 1, ROOMY), 1), lambda _: ReplicaId("peer"))
    for prompt in prompts:
        assert again.match(prompt) == {"peer": max(tree.match(prompt).values())}


def test_a_bound_keeps_what_was_used_last():
    tree = make_tree(1, ROOMY, ROOMY)
    for number in range(100):
        tree.add(b"shared " + bytes([number]) * 50, A)
    data = encode(tree.dump(), 1, 1000)
    assert len(data) < 1100
    again = make_tree(1, ROOMY, ROOMY)
    assert load(again, decode(data, 1)) > 5
    assert again.match(b"shared " + bytes([99]) * 50) == {A: 57}
    assert again.match(b"shared " + bytes([0]) * 50) == {A: 7}


def test_damage_is_refused_wherever_it_is():
    tree, _ = filled(2, 20)
    data = encode(tree.dump(), 1, ROOMY)
    for length in range(len(data)):
        with pytest.raises(ProtocolError):
            decode(data[:length], 1)
    rng = Random(1)
    for _ in range(2000):
        place = rng.randrange(len(data))
        broken = data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
        try:
            entries = decode(broken, 1)
        except ProtocolError:
            continue
        load(make_tree(1, 1 << 16, 1 << 16), entries)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"bnpt9" + bytes(20), "another version"),
        (b"bnpt1" + struct.pack("<BH", 4, 0), "4-byte units"),
        (b"bnpt1" + struct.pack("<BH", 1, 60_000), "60000 targets"),
        (b"bnpt1" + struct.pack("<BHHI", 1, 1, 0, 0), "name of 0 bytes"),
        (b"bnpt1" + struct.pack("<BHHBI", 1, 1, 1, 0xFF, 0), "no text"),
        (b"bnpt1" + struct.pack("<BHIII", 1, 0, 1, 5, 1) + b"x\0\0", "make no tree"),
        (b"bnpt1" + struct.pack("<BHIIIBHHQ", 1, 0, 1, 0, 1, 7, 1, 3, 0), "unknown target"),
        (b"bnpt1" + struct.pack("<BHI", 1, 0, 0) + b"x", "1 bytes too many"),
    ],
)
def test_refusals_say_why(data, words):
    with pytest.raises(ProtocolError, match=words):
        decode(data, 1)


def test_a_small_snapshot_that_stands_for_very_much_is_loaded_in_part(monkeypatch):
    monkeypatch.setattr(snapshot, "MAX_LOADED_BYTES", 5000)
    tree = make_tree(1, ROOMY, ROOMY)
    for number in range(50):
        tree.add(b"x" * 900 + bytes([number]), A)
    again = make_tree(1, ROOMY, ROOMY)
    assert load(again, tree.dump()) == 5
    assert again.match(b"x" * 900 + bytes([49])) == {A: 901}
