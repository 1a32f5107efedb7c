"""The prefix tree: the reference against what it stands for, the C++ tree against the reference."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from banaserve._native import PrefixTree as NativeTree
from banaserve_route.policies.interface import ReplicaId
from banaserve_route.policies.prefixes.tree import ENTRY_BYTES, FIFO, LRU, ORDERS, make_tree
from depth import num_examples
from prefix_reference import ReferencePrefixTree

A, B, C = (ReplicaId(name) for name in "abc")
TARGETS = (A, B, C)
ROOMY = 1 << 30

# Few letters and short words, so that prompts share starts and end within each other's edges.
words = st.lists(st.sampled_from([b"ab", b"ac", b"b", b"abab", b"aaaaaaaac"]), max_size=8)
prompts = words.map(b"".join)


def shared_units(one: bytes, other: bytes, unit_bytes: int) -> int:
    """Returns how many leading whole units are equal."""
    length = min(len(one), len(other)) // unit_bytes * unit_bytes
    for start in range(0, length, unit_bytes):
        if one[start : start + unit_bytes] != other[start : start + unit_bytes]:
            return start // unit_bytes
    return length // unit_bytes


class Trees(RuleBasedStateMachine):
    """Does the same to both trees and to a plain list of prompts."""

    @initialize(
        unit_bytes=st.sampled_from([1, 4, 8]),
        max_target_bytes=st.sampled_from([0, 300, 600, 2000, ROOMY]),
        max_bytes=st.sampled_from([300, 1500, ROOMY]),
        order=st.sampled_from(ORDERS),
    )
    def build(self, unit_bytes, max_target_bytes, max_bytes, order):
        arguments = (unit_bytes, max_target_bytes, max_bytes)
        self.reference = ReferencePrefixTree(*arguments, order)
        self.native = make_tree(*arguments, order)
        self.unit_bytes = unit_bytes
        self.is_roomy = min(max_target_bytes, max_bytes) == ROOMY
        self.recorded: dict[ReplicaId, list[bytes]] = {target: [] for target in TARGETS}
        self.matched = b""

    @rule(prompt=prompts, holder=st.sampled_from(TARGETS))
    def add(self, prompt, holder):
        self.reference.add(prompt, holder)
        self.native.add(prompt, holder)
        self.recorded[holder].append(prompt)

    @rule(holder=st.sampled_from(TARGETS))
    def add_what_was_matched(self, holder):
        self.add(self.matched, holder)

    @rule(prompt=prompts)
    def match(self, prompt):
        self.matched = prompt
        matched = self.reference.match(prompt)
        assert self.native.match(prompt) == matched
        tokens = {target: int(0.3 * units) for target, units in matched.items()}
        assert self.native.match(prompt, 0.3) == {key: n for key, n in tokens.items() if n}
        for target in TARGETS:
            longest = max(
                (shared_units(prompt, one, self.unit_bytes) for one in self.recorded[target]),
                default=0,
            )
            if self.is_roomy:
                assert matched.get(target, 0) == longest
            else:
                assert matched.get(target, 0) <= longest

    @rule(prompt=prompts, holder=st.sampled_from(TARGETS), num_units=st.integers(0, 12))
    def trim(self, prompt, holder, num_units):
        self.reference.trim(prompt, holder, num_units)
        self.native.trim(prompt, holder, num_units)
        keep = num_units * self.unit_bytes
        self.recorded[holder] = [
            one[:keep] if shared_units(one, prompt, self.unit_bytes) > num_units else one
            for one in self.recorded[holder]
        ]
        assert self.reference.match(prompt).get(holder, 0) <= num_units

    @rule(holder=st.sampled_from(TARGETS))
    def forget(self, holder):
        self.reference.forget(holder)
        self.native.forget(holder)
        self.recorded[holder] = []
        assert self.native.target_bytes(holder) == 0

    @invariant()
    def both_are_the_same(self):
        if not hasattr(self, "reference"):
            return
        self.reference.check()
        assert self.native.dump() == self.reference.dump()
        assert self.native.num_bytes == self.reference.num_bytes
        assert self.native.num_nodes == self.reference.num_nodes
        for target in TARGETS:
            assert self.native.target_bytes(target) == self.reference.target_bytes(target)


TestTrees = Trees.TestCase
TestTrees.settings = settings(max_examples=num_examples(60), stateful_step_count=25)

both = pytest.mark.parametrize("make", [ReferencePrefixTree, make_tree])
CHARGE = ENTRY_BYTES + 4


@both
def test_a_split_keeps_the_targets_of_what_it_splits(make):
    tree = make(1, ROOMY, ROOMY)
    tree.add(b"system-A", A)
    tree.add(b"system-B", B)
    assert tree.match(b"system-A") == {A: 8, B: 7}
    assert tree.match(b"system-C") == {A: 7, B: 7}
    assert [(entry.depth, entry.label, set(entry.stamps)) for entry in tree.dump()] == [
        (0, b"system-", {A, B}),
        (1, b"A", {A}),
        (1, b"B", {B}),
    ]


@both
@pytest.mark.parametrize(("order", "left"), [(LRU, {b"1111", b"3333"}), (FIFO, {b"2222", b"3333"})])
def test_lru_evicts_what_was_used_longest_ago_and_fifo_what_came_first(make, order, left):
    tree = make(1, 2 * CHARGE, ROOMY, order)
    for prompt in (b"1111", b"2222", b"1111", b"3333"):
        tree.add(prompt, A)
    assert {entry.label for entry in tree.dump()} == left


@both
def test_the_whole_tree_s_bound_takes_from_the_heaviest(make):
    tree = make(1, ROOMY, 3 * CHARGE)
    for prompt in (b"1111", b"2222", b"3333"):
        tree.add(prompt, A)
    tree.add(b"4444", B)
    assert tree.match(b"1111") == {}
    assert tree.match(b"4444") == {B: 4}


@both
def test_a_prompt_longer_than_the_bound_is_cut(make):
    tree = make(4, ENTRY_BYTES + 10, ROOMY)
    tree.add(b"0123456789abcdef", A)
    assert tree.match(b"0123456789abcdef") == {A: 2}


@both
def test_units_are_compared_whole(make):
    tree = make(4, ROOMY, ROOMY)
    tree.add(b"aaaabbbbcc", A)
    assert tree.match(b"aaaabbbX") == {A: 1}
    assert tree.match(b"aaa") == {}
    assert tree.match(b"aaaabbbbcc") == {A: 2}


def test_memory_is_flat_at_the_bound_and_a_path_as_long_as_a_prompt_ends_well():
    tree = make_tree(1, 200_000, 600_000)
    rng = Random(5)
    sizes = []
    for number in range(6000):
        tree.add(b"shared start " * 5 + rng.randbytes(60), TARGETS[number % 3])
        sizes.append(tree.num_bytes)
    assert max(sizes) <= 600_000
    assert min(sizes[4000:]) > 550_000
    deep = make_tree(1, ROOMY, ROOMY)
    for length in range(19_999, 0, -1):
        deep.add(b"x" * length, A)
    assert deep.num_nodes == 19_999
    deep.forget(A)
    assert (deep.num_nodes, deep.num_bytes, deep.match(b"x")) == (0, 0, {})
    for length in range(19_999, 0, -1):
        deep.add(b"x" * length, A)
    del deep


def test_names_that_come_and_go_leave_nothing():
    tree = make_tree(1, ROOMY, ROOMY)
    for number in range(3000):
        target = ReplicaId(f"target {number}")
        tree.add(b"prompt", target)
        tree.forget(target)
    assert tree.dump() == []
    tree.add(b"prompt", A)
    assert tree.match(b"prompt") == {A: 6}


def test_units_of_an_odd_size_and_negative_tokens_are_refused():
    with pytest.raises(ValueError, match="unit_bytes"):
        NativeTree(3, 1, 1)
    with pytest.raises(ValueError, match="tokens_per_unit"):
        NativeTree(4, 1, 1).match(b"abcd", -1.0)
