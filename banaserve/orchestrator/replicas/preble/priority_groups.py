"""Preble's local scheduler (Alg. 3): the order in which one engine takes its waiting requests.

Requests are in groups by the cached fraction of their prompt; group ``g`` of ``P`` gets ``g``
turns for each one of group 1, and within a group the oldest goes first. The listing gives group 0
no turns, and so starves prompts with nothing cached; here a fraction ``f`` is in group
``max(1, ceil(P * f))``.

Turns are those of stride scheduling: a group's clock advances by ``1 / g`` with each of its
requests, the group whose clock is lowest goes next, and one that was empty begins at the clock of
the group that went last. So between two requests of group ``g`` that waits, group ``h`` gets
``h / g + 1`` turns at most, whatever arrives.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from math import ceil, lcm
from typing import Any, Generic, TypeVar

from banaserve.errors import UserError

NUM_GROUPS = 10
"""Preble's."""
_MAX_GROUPS = 40
_RETURNING = 0

Item = TypeVar("Item", bound=Hashable)


def group_of(cached_fraction: float, num_groups: int = NUM_GROUPS) -> int:
    """Returns the group, 1 to ``num_groups``, of a prompt that is cached to that fraction."""
    return min(num_groups, max(1, ceil(num_groups * cached_fraction)))


class PriorityGroups(Generic[Item]):
    """The waiting requests of one engine.

    An item comes with its ``age``, by which items are ordered within a group, the least first; no
    two have the same. An item only moves up: one that swung between groups would lose its turn
    each time.
    """

    def __init__(self, num_groups: int = NUM_GROUPS) -> None:
        """Raises:
        UserError: ``num_groups`` is not 1 to 40.
        """
        if not 1 <= num_groups <= _MAX_GROUPS:
            raise UserError(f"num_groups is {num_groups}: give 1 to {_MAX_GROUPS}")
        self.num_groups = num_groups
        turn = lcm(*range(1, num_groups + 1))
        # Whole numbers, so that equal shares stay equal. Place 0 is for those that come back.
        self._strides = [0, *(turn // group for group in range(1, num_groups + 1))]
        self._clocks = [0] * (num_groups + 1)
        self._now = 0
        self._groups: list[list[tuple[Any, Item]]] = [[] for _ in range(num_groups + 1)]
        self._places: OrderedDict[Item, tuple[int, Any]] = OrderedDict()
        self._taken: dict[Item, tuple[int, Any]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: object) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[Item]:
        """Yields the items that come back first, then group by group from the highest."""
        for group in (_RETURNING, *range(self.num_groups, 0, -1)):
            yield from (item for _, item in self._groups[group])

    def add(self, item: Item, age: Any, cached_fraction: float) -> None:
        """Takes in a request that has just come."""
        self._put(item, group_of(cached_fraction, self.num_groups), age)

    def add_first(self, item: Item, age: Any) -> None:
        """Takes in one that had its turn and lost what it got: it goes before all groups."""
        self._put(item, _RETURNING, age)

    def peek(self) -> Item:
        """Returns who is next; the same that ``pop`` takes.

        Raises:
            IndexError: No request waits.
        """
        return self._groups[self._next()][0][1]

    def pop(self) -> Item:
        """Takes out who is next, and counts the turn.

        Raises:
            IndexError: No request waits.
        """
        group = self._next()
        age, item = self._groups[group].pop(0)
        del self._places[item]
        self._taken[item] = group, age
        self._now = max(self._now, self._clocks[group])
        self._clocks[group] += self._strides[group]
        return item

    def was_taken(self, item: Item) -> bool:
        """Whether ``item`` was popped since the last ``settle``."""
        return item in self._taken

    def put_back(self, item: Item) -> None:
        """Returns a request that was popped and could not be served, to its place and its turn."""
        group, age = self._taken.pop(item)
        if group != _RETURNING:
            self._clocks[group] = max(self._now, self._clocks[group] - self._strides[group])
        self._put(item, group, age)

    def settle(self) -> None:
        """Says that what was popped is served and will not be put back."""
        self._taken.clear()

    def remove(self, item: Item) -> None:
        """Takes out a request that is not wanted any more.

        Raises:
            KeyError: It does not wait.
        """
        group, age = self._places.pop(item)
        del self._groups[group][self._place(group, age)]

    def raise_to(self, item: Item, cached_fraction: float) -> None:
        """Says that more of a waiting request is cached; less changes nothing."""
        group, age = self._places[item]
        higher = group_of(cached_fraction, self.num_groups)
        if group != _RETURNING and higher > group:
            self.remove(item)
            self._put(item, higher, age)

    def to_look_at(self, count: int) -> list[Item]:
        """Returns ``count`` waiting requests at most, others each time until all had their turn."""
        found = []
        for _ in range(min(count, len(self._places))):
            item = next(iter(self._places))
            self._places.move_to_end(item)
            found.append(item)
        return found

    def check(self) -> None:
        """Asserts what always holds: for tests."""
        ages = [[age for age, _ in group] for group in self._groups]
        assert all(one == sorted(one) for one in ages)
        listed = {
            item: (number, age) for number, group in enumerate(self._groups) for age, item in group
        }
        assert listed == dict(self._places)
        assert not listed.keys() & self._taken.keys()
        waiting = [number for number in range(1, len(ages)) if ages[number]]
        assert all(self._clocks[number] >= 0 for number in waiting)

    def _next(self) -> int:
        if self._groups[_RETURNING]:
            return _RETURNING
        waiting = [group for group in range(1, self.num_groups + 1) if self._groups[group]]
        if not waiting:
            raise IndexError("no request waits")
        return min(waiting, key=lambda group: (self._clocks[group], -group))

    def _put(self, item: Item, group: int, age: Any) -> None:
        if item in self._places:
            raise ValueError(f"{item} waits already")
        if not self._groups[group]:
            self._clocks[group] = max(self._clocks[group], self._now)
        # An item need not be comparable: ages decide, and no two are equal.
        insort(self._groups[group], (age, item), key=_age)
        self._places[item] = group, age

    def _place(self, group: int, age: Any) -> int:
        return bisect_left(self._groups[group], age, key=_age)


def _age(entry: tuple[Any, Any]) -> Any:
    return entry[0]
