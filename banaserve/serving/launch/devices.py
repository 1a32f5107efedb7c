"""CUDA devices of the instances: those given at start, and free ones for added instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from banaserve.base.errors import MigrationError, UserError

_SHARED = 0.9
"""Fraction of a GPU's memory for the instances on it: CUDA itself takes half a gigabyte for each,
and guests take theirs."""


class Devices:
    """Assignment of devices to instances.

    Args:
        given: Values of CUDA_VISIBLE_DEVICES by instance; empty on CPU.
        visible: All devices that instances may have; empty on CPU.
        num_each: Number of devices of an added instance; 0 on CPU.
    """

    def __init__(
        self, given: Mapping[str, str], visible: Sequence[str] = (), num_each: int = 0
    ) -> None:
        self._given = dict(given)
        self._visible = list(visible)
        self._num_each = num_each

    def of(self, instance_id: str) -> str | None:
        """Return the instance's CUDA_VISIBLE_DEVICES; None on CPU."""
        return self._given.get(instance_id)

    def reserve(self, instance_id: str) -> None:
        """Give an instance the next free devices, unless it already has some; nothing on CPU.

        Raises:
            MigrationError: There are not enough free devices.
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
        """Free the devices of an instance that has been removed."""
        self._given.pop(instance_id, None)


def check_groups(groups: Sequence[str], num_ranks: Sequence[int]) -> None:
    """Check that each instance has a GPU for each of its tensor-parallel ranks.

    Raises:
        UserError: A group has too few devices, or names one twice: NCCL takes no GPU twice.
    """
    for group, needed in zip(groups, num_ranks, strict=True):
        names = [name.strip() for name in group.split(",")]
        if len(names) < needed or len(set(names)) < len(names):
            example = ",".join(str(number) for number in range(needed))
            raise UserError(
                f"--devices {group!r}: an instance of {needed} tensor-parallel ranks needs as many "
                f"different GPUs, such as {example!r}, or a smaller --tensor-parallel-size"
            )


def check_memory(groups: Sequence[str], fraction: float) -> None:
    """Check that the instances on a GPU together take no more than its memory.

    Args:
        fraction: Fraction of a GPU's memory that each instance takes, as vLLM is told.

    Raises:
        UserError: They take more: the last of them would fail when it starts.
    """
    users = Counter(name.strip() for group in groups for name in group.split(","))
    [(name, count)] = users.most_common(1)
    if count > 1 and count * fraction > 1:
        raise UserError(
            f"--devices: {count} instances on GPU {name} take {fraction:g} of its memory each: "
            f"give --gpu-memory-utilization {_SHARED / count:.2f} too"
        )
