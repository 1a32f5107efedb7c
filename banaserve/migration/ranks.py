"""Agreement of the tensor-parallel ranks of a host: work has succeeded on all of them, or on none.

Each rank has a migration host and its own process of a guest. The ranks add up their layers'
results, so no rank may run a layer at home that another rank runs in a guest. All calls are
collective: every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from banaserve.base.errors import GuestLostError, MigrationError

OTHER_FAILED = "another tensor-parallel rank has failed"
T = TypeVar("T")


class Ranks:
    """Tensor-parallel ranks of one engine.

    Args:
        group: PyTorch's process group of all ranks, for host memory; None if there is one rank.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    @property
    def is_alone(self) -> bool:
        return self._group is None

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return 0 if self._group is None else int(self._group.rank())

    def any_of(self, mine: Sequence[bool]) -> list[bool]:
        """Return for each flag, in the order of ``mine``, whether it is set on any rank."""
        if self._group is None or not mine:
            return list(mine)
        told, options = torch.tensor(mine, dtype=torch.uint8), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._group.allreduce([told], options).wait()
        return [bool(one) for one in told.tolist()]

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``, if it has succeeded on all ranks.

        Raises:
            GuestLostError, MigrationError: The work has failed on a rank; the work's own error if
                it has failed on this one.
        """
        if self._group is None:
            return work()
        failed: Exception | None = None
        try:
            done = work()
        except Exception as error:  # any error: the other ranks wait for this one
            failed = error
        (has_failed,) = self.any_of([failed is not None])
        if failed is not None:
            raise failed
        if has_failed:
            raise MigrationError(OTHER_FAILED)
        return done

    def lost(
        self, mine: GuestLostError | None, give_up: Callable[[str], GuestLostError]
    ) -> GuestLostError | None:
        """Return the reason why a guest is lost on any rank; None if it is lost on none.

        Args:
            mine: Reason why the guest is lost on this rank; None if it is not.
            give_up: Function that ends the guest's process of this rank.
        """
        (is_lost,) = self.any_of([mine is not None])
        return mine or give_up(OTHER_FAILED) if is_lost else None

    def step(self, work: Callable[[], T], give_up: Callable[[str], GuestLostError]) -> T:
        """Return the guest's answer to its part of a step, if the guests of all ranks answer.

        Raises:
            GuestLostError: A guest process has not answered; this rank's is given up then, too.
        """
        try:
            return self.run(work)
        except MigrationError:
            raise give_up(OTHER_FAILED) from None


def check_devices(num_ranks: int, num_devices: int) -> None:
    """Check that each rank of a guest has a GPU of its own: NCCL takes no GPU twice.

    Raises:
        MigrationError: There are fewer GPUs than ranks.
    """
    if num_devices < num_ranks:
        raise MigrationError(
            f"a guest of {num_ranks} tensor-parallel ranks needs as many GPUs, and its instance "
            f"has {num_devices}: move to an instance of the same --tensor-parallel-size"
        )
