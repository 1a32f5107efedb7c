"""What every transport's opened region has in common: checked plans and one thread to copy."""

from __future__ import annotations

from abc import ABC, abstractmethod

from banaserve.transport.interface import Offsets, RegionDescriptor
from banaserve.transport.memory import Memory
from banaserve.transport.plans import check_range, make_plan
from banaserve.transport.tickets import CopyThread, PlanTicket


class PlannedRegion(ABC):
    """A peer's region whose transfers are carried out one after the other.

    Args:
        descriptor: Of the region.

    Attributes:
        never_waits_for_peer: Copies end by themselves, whatever the peer does.
    """

    never_waits_for_peer = False

    def __init__(self, descriptor: RegionDescriptor) -> None:
        self._descriptor = descriptor
        self._copies = CopyThread(
            f"transport-{descriptor.transport}-copy",
            self._carry_out,
            self._break_off,
            waiters_help=self.never_waits_for_peer,
        )

    @property
    def descriptor(self) -> RegionDescriptor:
        return self._descriptor

    def submit_write(
        self,
        local: Memory,
        local_offsets: Offsets,
        remote_offsets: Offsets,
        num_bytes: int,
        epoch: int,
    ) -> PlanTicket:
        plan = make_plan(
            self._descriptor,
            local,
            local_offsets,
            remote_offsets,
            num_bytes,
            epoch=epoch,
            writes=True,
        )
        return self._copies.submit(plan)

    def submit_read(
        self,
        local: Memory,
        local_offsets: Offsets,
        remote_offsets: Offsets,
        num_bytes: int,
        epoch: int,
    ) -> PlanTicket:
        plan = make_plan(
            self._descriptor,
            local,
            local_offsets,
            remote_offsets,
            num_bytes,
            epoch=epoch,
            writes=False,
        )
        return self._copies.submit(plan)

    def warm(self, first_byte: int, num_bytes: int) -> None:
        check_range(first_byte, num_bytes, self._descriptor.num_bytes)

    def close(self) -> None:
        self._copies.close()

    @abstractmethod
    def _carry_out(self, ticket: PlanTicket) -> None:
        """Copy what the ticket's plan says; runs on the region's copy thread.

        Raises:
            TransportError: It did not work.
        """

    def _break_off(self) -> None:
        """Make a ``_carry_out`` that waits for the peer fail soon."""
        return
