"""Agreement of the tensor-parallel ranks of a host: something has ended well on all, or on none.

Each rank has a migration host and its own process of a guest. The layers of all ranks add up what
they have computed, so no rank may run a layer at home that another runs in a guest. All calls are
collective: every rank makes the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from banaserve.errors import GuestLostError, MigrationError

OTHER_FAILED = "another tensor-parallel rank has failed"
T = TypeVar("T")


class Ranks:
    """Of one engine.

    Args:
        group: PyTorch's process group of all ranks, for host memory; None where there is one.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    @property
    def is_alone(self) -> bool:
        return self._group is None

    @property
    def rank(self) -> int:
        """Of this process."""
        return 0 if self._group is None else int(self._group.rank())

    def any_of(self, mine: Sequence[bool]) -> list[bool]:
        """What holds on any rank, for each of the same questions."""
        if self._group is None or not mine:
            return list(mine)
        told, options = torch.tensor(mine, dtype=torch.uint8), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._group.allreduce([told], options).wait()
        return [bool(one) for one in told.tolist()]

    def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, if it has ended on all ranks.

        Raises:
            GuestLostError, MigrationError: It has not; the work's own error, if this rank has one.
        """
        if self._group is None:
            return work()
        failed: Exception | None = None
        try:
            done = work()
        except Exception as error:  # whatever it is, others wait for this rank
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
        """Why a guest is lost on any rank; None where it is on none.

        Args:
            mine: Why it is on this one; None where it is not.
            give_up: Ends the guest's process of this rank.
        """
        (is_lost,) = self.any_of([mine is not None])
        return mine or give_up(OTHER_FAILED) if is_lost else None

    def step(self, work: Callable[[], T], give_up: Callable[[str], GuestLostError]) -> T:
        """What a guest answers to its part of a step, if the guests of all ranks have.

        Args:
            give_up: Ends the guest's process of this rank.

        Raises:
            GuestLostError: One has not; this rank's process is given up then, too.
        """
        try:
            return self.run(work)
        except MigrationError:
            raise give_up(OTHER_FAILED) from None
