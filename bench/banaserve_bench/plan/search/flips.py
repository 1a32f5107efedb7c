"""Flip points: values of a quantity at which an estimate changes between yes and no. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

_DOUBLINGS = 3
_HALVINGS = 3


@dataclass(frozen=True, slots=True)
class Flip:
    """Change of the estimate between two values of a quantity.

    Attributes:
        low, high: Values between which the estimate changes.
        pays_above: True if a split pays above ``high``, False if it pays below ``low``.
    """

    quantity: str
    low: float
    high: float
    pays_above: bool


def find_flips(quantity: str, value: float, pays: Callable[[float], bool | None]) -> list[Flip]:
    """Return the nearest flip below and above ``value``, up to a factor of 8 away.

    Args:
        pays: Function that returns whether a split pays at ``value`` times its argument; None where
            that cannot be simulated.
    """
    now = pays(1.0)
    found = []
    for factor in (0.5, 2.0):
        near = 1.0
        for _ in range(_DOUBLINGS):
            far = near * factor
            there = pays(far)
            if there is None:
                break
            if there != now:
                near, far = _bisected(near, far, now, pays)
                low, high = sorted((near, far))
                found.append(Flip(quantity, low * value, high * value, there == (factor > 1)))
                break
            near = far
    return found


def _bisected(
    near: float, far: float, now: bool | None, pays: Callable[[float], bool | None]
) -> tuple[float, float]:
    for _ in range(_HALVINGS):
        middle = sqrt(near * far)
        if pays(middle) == now:
            near = middle
        else:
            far = middle
    return near, far
