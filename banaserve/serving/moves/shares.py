"""Bounds of the share of each instance's device that guests beside it take."""

from __future__ import annotations

from banaserve.base.config import LEAST_GUEST_SHARE
from banaserve.base.errors import MigrationError
from banaserve.base.types import InstanceId


class Shares:
    """Bound of each instance, which all guests beside the instance share evenly.

    Args:
        fraction: Bound of instances for which no other was set.
    """

    def __init__(self, fraction: float = 1.0) -> None:
        self._fraction = fraction
        self._own: dict[InstanceId, float] = {}

    def bound(self, target: InstanceId) -> float:
        """Return the share of the device of ``target`` that guests beside it may take together."""
        return self._own.get(target, self._fraction)

    def set(self, target: InstanceId, fraction: float) -> None:
        """Bound the guests beside ``target``, also those that come later.

        Raises:
            MigrationError: The fraction is out of range.
        """
        if not LEAST_GUEST_SHARE <= fraction <= 1.0:
            raise MigrationError(
                f"guests take {LEAST_GUEST_SHARE:g} to 1 of a device, not {fraction:g}"
            )
        self._own[target] = fraction

    def forget(self, target: InstanceId) -> None:
        """Forget the bound of an instance that has been removed."""
        self._own.pop(target, None)
