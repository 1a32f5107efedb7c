"""CUDA devices of the instances: those of the start, and free ones for instances that are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from banaserve.errors import MigrationError


class Devices:
    """Says which devices are whose, and finds some that nobody has.

    Args:
        given: Values of CUDA_VISIBLE_DEVICES by instance; empty on CPU.
        visible: Every device that instances may have; none on CPU.
        num_each: Of an instance that is added; 0 on CPU.
    """

    def __init__(
        self, given: Mapping[str, str], visible: Sequence[str] = (), num_each: int = 0
    ) -> None:
        self._given = dict(given)
        self._visible = list(visible)
        self._num_each = num_each

    def of(self, instance_id: str) -> str | None:
        """The instance's CUDA_VISIBLE_DEVICES; None on CPU."""
        return self._given.get(instance_id)

    def reserve(self, instance_id: str) -> None:
        """Give an instance the next devices that nobody has, unless it has some already.

        Without effect on CPU.

        Raises:
            MigrationError: There are not enough.
        """
        if not self._num_each or instance_id in self._given:
            return
        taken = {name.strip() for group in self._given.values() for name in group.split(",")}
        free = [name for name in self._visible if name not in taken]
        if len(free) < self._num_each:
            raise MigrationError(
                f"another instance needs {self._num_each} GPUs that no instance has: of the "
                f"{len(self._visible)} that this server sees, {len(free)} are free"
            )
        self._given[instance_id] = ",".join(free[: self._num_each])

    def release(self, instance_id: str) -> None:
        """The instance is there no more."""
        self._given.pop(instance_id, None)
