"""Rotation among instances that are equally good."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from banaserve.base.types import InstanceId, InstanceView


class Rotation:
    """Order of instances in which the one chosen longest ago comes first.

    A counter modulo the number of candidates would shift all turns when an instance joins or dies,
    and could skip the same instance forever when the candidates alternate. This order does neither,
    and over a fixed set it is plain round robin.

    Each leg has its own rotation: with a shared one, requests that alternate between one and two
    legs would always get the same instance.
    """

    def __init__(self, start: int = 0) -> None:
        """Start the rotation at place ``start`` in the order of ids.

        Front doors have different starts: else all of them would begin with the same instance.
        """
        self._start = start
        self._turn = 0
        self._chosen_at: dict[InstanceId, int] = {}

    def order(self, views: Sequence[InstanceView]) -> list[InstanceView]:
        """Return ``views``: instances never chosen first, then by the turn of the last choice."""
        by_place = sorted(views, key=attrgetter("id"))
        if by_place and (shift := self._start % len(by_place)):
            by_place = by_place[shift:] + by_place[:shift]
        turn = self._chosen_at.get
        by_place.sort(key=lambda view: turn(view.id, 0))
        return by_place

    def take(self, chosen: InstanceView) -> InstanceView:
        """Move ``chosen`` to the end of the order and return it."""
        self._turn += 1
        self._chosen_at[chosen.id] = self._turn
        return chosen
