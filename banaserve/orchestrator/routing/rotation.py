"""Rotation among instances that are equally good."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from banaserve.types import InstanceId, InstanceView


class Rotation:
    """Orders instances so that the one chosen longest ago comes first.

    A counter modulo the number of candidates would shift everybody's turn when an instance joins
    or dies, and can pass over the same instance for ever when the candidates alternate. The
    order kept here does neither, and over a fixed set it is plain round robin.

    One rotation serves one leg: with a shared one, requests that alternate between one and two
    legs would always meet the same instance.
    """

    def __init__(self, start: int = 0) -> None:
        """``start`` is the first one's place in the order of ids.

        Several front doors start apart, else all of them open with the same instance.
        """
        self._start = start
        self._turn = 0
        self._chosen_at: dict[InstanceId, int] = {}

    def order(self, views: Sequence[InstanceView]) -> list[InstanceView]:
        """Returns ``views``: never chosen first, then by the turn of the last choice."""
        by_place = sorted(views, key=attrgetter("id"))
        if by_place and (shift := self._start % len(by_place)):
            by_place = by_place[shift:] + by_place[:shift]
        turn = self._chosen_at.get
        by_place.sort(key=lambda view: turn(view.id, 0))
        return by_place

    def take(self, chosen: InstanceView) -> InstanceView:
        """Sends ``chosen`` to the end of the order and returns it."""
        self._turn += 1
        self._chosen_at[chosen.id] = self._turn
        return chosen
