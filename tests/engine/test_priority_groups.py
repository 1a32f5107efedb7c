"""Preble's order of waiting requests: groups by cached fraction, shares, and nobody starved."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from banaserve.base.errors import UserError
from banaserve.engine.priority_groups import PriorityGroups, group_of
from depth import num_examples


def check_groups(groups: PriorityGroups) -> None:
    """Assert what must hold between two operations."""
    ages = [[age for age, _ in group] for group in groups._groups]
    assert all(one == sorted(one) for one in ages)
    listed = {
        item: (number, age) for number, group in enumerate(groups._groups) for age, item in group
    }
    assert listed == dict(groups._places)
    assert not listed.keys() & groups._taken.keys()
    waiting = [number for number in range(1, len(ages)) if ages[number]]
    assert all(groups._clocks[number] >= 0 for number in waiting)


@pytest.mark.parametrize(
    ("cached_fraction", "group"),
    [
        (0.0, 1),
        (0.05, 1),
        (0.1, 1),
        (0.11, 2),
        (0.5, 5),
        (0.63, 7),
        (0.9, 9),
        (0.91, 10),
        (1.0, 10),
    ],
)
def test_groups_of_ten(cached_fraction: float, group: int) -> None:
    assert group_of(cached_fraction) == group


@pytest.mark.parametrize("num_groups", [0, 41])
def test_a_number_of_groups_that_makes_no_sense_is_refused(num_groups: int) -> None:
    with pytest.raises(UserError, match="give 1 to 40"):
        PriorityGroups(num_groups)


def filled(*requests: tuple[str, float], num_groups: int = 3) -> PriorityGroups[str]:
    groups: PriorityGroups[str] = PriorityGroups(num_groups)
    for age, (name, cached_fraction) in enumerate(requests):
        groups.add(name, age, cached_fraction)
    return groups


def drained(groups: PriorityGroups[str]) -> str:
    return " ".join(groups.pop() for _ in range(len(groups)))


@pytest.mark.parametrize(
    ("requests", "order"),
    [
        ([("a", 0), ("b", 0), ("c", 0)], "a b c"),
        ([("cold", 0), ("warm", 0.5), ("hot", 1)], "hot warm cold"),
        # Of six turns three are the highest group's, two the middle one's and one the lowest's.
        (
            [(f"{group}{n}", group / 3) for n in range(4) for group in (1, 2, 3)],
            "30 20 10 31 21 32 33 22 11 23 12 13",
        ),
        ([("low", 0)] + [(f"h{n}", 1) for n in range(5)], "h0 low h1 h2 h3 h4"),
    ],
)
def test_order(requests: list[tuple[str, float]], order: str) -> None:
    assert drained(filled(*requests)) == order


def test_one_that_comes_back_goes_first_and_costs_nobody_a_turn() -> None:
    groups = filled(("a", 0), ("b", 1))
    assert groups.pop() == "b"
    groups.settle()
    groups.add_first("b", 1)
    assert groups.peek() == "b"
    assert drained(groups) == "b a"


def test_one_that_is_put_back_keeps_its_place_and_its_turn() -> None:
    requests = [(f"{group}{n}", group / 3) for n in range(3) for group in (1, 2, 3)]
    order = drained(filled(*requests)).split()
    groups = filled(*requests)
    taken = [groups.pop() for _ in range(4)]
    assert taken == order[:4]
    # vLLM gives back what it skipped in one step, the last first.
    for name in reversed(taken):
        groups.put_back(name)
    check_groups(groups)
    assert drained(groups).split()[0] == order[0]
    assert len(groups) == 0


def test_what_becomes_cached_moves_up_and_never_down() -> None:
    groups = filled(("a", 0), ("b", 0), ("c", 1))
    groups.raise_to("b", 1)
    groups.raise_to("c", 0)
    assert list(groups) == ["b", "c", "a"]


def test_a_look_at_a_few_comes_round_to_everybody() -> None:
    groups = filled(*((str(number), 0.0) for number in range(7)))
    seen = [name for _ in range(3) for name in groups.to_look_at(3)]
    assert set(seen) == {str(number) for number in range(7)}
    assert groups.to_look_at(100) == [*"2345601"]


@settings(max_examples=num_examples(60), deadline=None)
@given(
    st.lists(st.integers(1, 10), min_size=1, max_size=6, unique=True),
    st.integers(1, 10),
)
def test_shares_are_in_proportion_while_all_wait(groups_given: list[int], rounds: int) -> None:
    groups: PriorityGroups[tuple[int, int]] = PriorityGroups(10)
    turns = rounds * sum(groups_given)
    for number in range(turns):
        for group in groups_given:
            groups.add((group, number), (number, group), group / 10)
    served = Counter(groups.pop()[0] for _ in range(turns))
    for group in groups_given:
        assert abs(served[group] - rounds * group) <= 1


@settings(max_examples=num_examples(60), deadline=None)
@given(st.integers(1, 10), st.lists(st.integers(1, 10), min_size=250, max_size=250))
def test_nobody_starves_whatever_comes(group: int, others: list[int]) -> None:
    """The bound of stride scheduling: ``h / g + 1`` turns of every other group ``h``."""
    groups: PriorityGroups[object] = PriorityGroups(10)
    for number, other in enumerate(others[:100]):
        groups.add(number, number, other / 10)
    for _ in range(50):
        groups.pop()
    # Younger than all that wait in its group: these go first, and are not the others' doing.
    own = sum(1 for item in groups if group_of(others[item] / 10) == group)
    groups.add("this", 1000, group / 10)
    bound = sum((own + 1) * other / group + 1 for other in range(1, 11) if other != group) + own
    for waited, other in enumerate(others[100:]):
        assert waited <= bound
        groups.add(2000 + waited, 2000 + waited, other / 10)
        if groups.pop() == "this":
            return
    assert bound >= len(others[100:]), "it was not its turn at all"


class Waiting(RuleBasedStateMachine):
    """Every request is served once, whatever is put back, comes back or leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: PriorityGroups[int] = PriorityGroups(5)
        self.waiting: set[int] = set()
        self.taken: list[int] = []
        self.served: list[int] = []
        self.count = 0

    @rule(cached_fraction=st.floats(0, 1))
    def comes(self, cached_fraction: float) -> None:
        self.groups.add(self.count, self.count, cached_fraction)
        self.waiting.add(self.count)
        self.count += 1

    @precondition(lambda self: self.waiting)
    @rule()
    def is_taken(self) -> None:
        expected = self.groups.peek()
        item = self.groups.pop()
        assert item == expected
        self.waiting.remove(item)
        self.taken.append(item)

    @precondition(lambda self: self.taken)
    @rule()
    def is_put_back(self) -> None:
        item = self.taken.pop()
        assert self.groups.was_taken(item)
        self.groups.put_back(item)
        self.waiting.add(item)

    @rule()
    def settles(self) -> None:
        self.groups.settle()
        self.served += self.taken
        self.taken = []

    @precondition(lambda self: self.served)
    @rule(place=st.integers(0, 1000))
    def is_preempted(self, place: int) -> None:
        item = self.served.pop(place % len(self.served))
        self.groups.add_first(item, item)
        self.waiting.add(item)
        assert self.groups.peek() not in self.served

    @precondition(lambda self: self.waiting)
    @rule(place=st.integers(0, 1000), cached_fraction=st.floats(0, 1))
    def is_raised(self, place: int, cached_fraction: float) -> None:
        self.groups.raise_to(sorted(self.waiting)[place % len(self.waiting)], cached_fraction)

    @precondition(lambda self: self.waiting)
    @rule(place=st.integers(0, 1000))
    def leaves(self, place: int) -> None:
        item = sorted(self.waiting)[place % len(self.waiting)]
        self.groups.remove(item)
        self.waiting.remove(item)

    @invariant()
    def holds(self) -> None:
        check_groups(self.groups)
        assert set(self.groups) == self.waiting
        assert len(self.groups) == len(self.waiting)


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=num_examples(60), stateful_step_count=40)
