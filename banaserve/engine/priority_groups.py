"""Preble's local scheduler (Alg. 3): the order in which one engine takes its waiting requests.

Requests are grouped by the cached fraction of their prompt; group ``g`` of ``P`` gets ``g`` turns
for each turn of group 1, and within a group the oldest request comes first. The paper's listing
gives group 0 no turns, which starves prompts without cached tokens; here a fraction ``f`` is in
group ``max(1, ceil(P * f))``.

Turns follow stride scheduling: a group's clock advances by ``1 / g`` with each of its requests, the
group with the lowest clock is next, and a group that was empty begins at the clock of the last
group served. So between two requests of a waiting group ``g``, group ``h`` gets at most
``h / g + 1`` turns, whatever arrives.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from math import ceil, lcm
from typing import Any, Generic, TypeVar

from banaserve.base.errors import UserError

NUM_GROUPS = 10
"""Number of groups P, as in Preble."""
_MAX_GROUPS = 40
_RETURNING = 0

Item = TypeVar("Item", bound=Hashable)


def group_of(cached_fraction: float, num_groups: int = NUM_GROUPS) -> int:
    """Return the group, 1 to ``num_groups``, of a prompt with that cached fraction."""
    return min(num_groups, max(1, ceil(num_groups * cached_fraction)))


class PriorityGroups(Generic[Item]):
    """The waiting requests of one engine.

    Each item has an ``age``, by which items are ordered within a group, the smallest first; ages
    are unique. An item only moves to higher groups: an item that alternated between groups would
    lose its turn each time.
    """

    def __init__(self, num_groups: int = NUM_GROUPS) -> None:
        """Create empty groups.

        Raises:
            UserError: ``num_groups`` is not 1 to 40.
        """
        if not 1 <= num_groups <= _MAX_GROUPS:
            raise UserError(f"num_groups is {num_groups}: give 1 to {_MAX_GROUPS}")
        self.num_groups = num_groups
        turn = lcm(*range(1, num_groups + 1))
        # Integers, so that equal shares stay equal. Group 0 is for preempted items that return.
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
        """Yield the items of ``add_first``, then those of the groups from the highest on."""
        for group in (_RETURNING, *range(self.num_groups, 0, -1)):
            yield from (item for _, item in self._groups[group])

    def add(self, item: Item, age: Any, cached_fraction: float) -> None:
        """Add a request that has just arrived."""
        self._put(item, group_of(cached_fraction, self.num_groups), age)

    def add_first(self, item: Item, age: Any) -> None:
        """Add a request that had its turn and lost its resources again, before all groups."""
        self._put(item, _RETURNING, age)

    def peek(self) -> Item:
        """Return the next item, which ``pop`` would take.

        Raises:
            IndexError: No request waits.
        """
        return self._groups[self._next()][0][1]

    def pop(self) -> Item:
        """Remove and return the next item, and count the turn.

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
        """Return whether ``item`` was popped since the last ``settle``."""
        return item in self._taken

    def put_back(self, item: Item) -> None:
        """Put a popped request that could not be served back to its place, and restore its turn."""
        group, age = self._taken.pop(item)
        if group != _RETURNING:
            self._clocks[group] = max(self._now, self._clocks[group] - self._strides[group])
        self._put(item, group, age)

    def settle(self) -> None:
        """Confirm that all popped items are served and will not be put back."""
        self._taken.clear()

    def remove(self, item: Item) -> None:
        """Remove a request that is not needed any more.

        Raises:
            KeyError: The request does not wait.
        """
        group, age = self._places.pop(item)
        del self._groups[group][self._place(group, age)]

    def raise_to(self, item: Item, cached_fraction: float) -> None:
        """Move a waiting request to the group of ``cached_fraction``; never to a lower group."""
        group, age = self._places[item]
        higher = group_of(cached_fraction, self.num_groups)
        if group != _RETURNING and higher > group:
            self.remove(item)
            self._put(item, higher, age)

    def to_look_at(self, count: int) -> list[Item]:
        """Return at most ``count`` waiting requests; successive calls cycle through all of them."""
        found = []
        for _ in range(min(count, len(self._places))):
            item = next(iter(self._places))
            self._places.move_to_end(item)
            found.append(item)
        return found

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
        # Items need not be comparable: ages decide, and are unique.
        insort(self._groups[group], (age, item), key=_age)
        self._places[item] = group, age

    def _place(self, group: int, age: Any) -> int:
        return bisect_left(self._groups[group], age, key=_age)


def _age(entry: tuple[Any, Any]) -> Any:
    return entry[0]
