"""Opened regions of a peer: checked plans, their tickets, and the thread that copies."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from banaserve.transport.errors import (
    PeerGoneError,
    TransferCancelledError,
    TransferTimeoutError,
    TransportError,
)
from banaserve.transport.interface import Offsets, RegionDescriptor
from banaserve.transport.memory import Memory, Plan
from banaserve.transport.regions.argument_checks import check_range, make_plan

CANCEL_WAIT_S = 1.0
MAX_HELP_BYTES = 64 * 2**20
"""Maximum size of a transfer that the waiting thread may copy itself. A larger transfer is left to
the copy thread, because the waiting thread has a deadline."""


class PlannedRegion(ABC):
    """Region of a peer whose transfers are executed sequentially.

    Args:
        descriptor: Descriptor of the region.

    Attributes:
        never_waits_for_peer: True if copies end without any action of the peer.
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
        """Copy the runs of the ticket's plan, in the copy thread or a thread that waits for it.

        Raises:
            TransportError: The copy failed.
        """

    def _break_off(self) -> None:
        """Make a ``_carry_out`` that waits for the peer fail soon."""
        return


class PlanTicket:
    """Ticket of a plan.

    Attributes:
        plan: Runs to copy.
    """

    def __init__(
        self,
        plan: Plan,
        interrupt: Callable[[PlanTicket], None],
        help_with: Callable[[PlanTicket], None] | None,
    ) -> None:
        self.plan = plan
        self._interrupt = interrupt
        self._help_with = help_with
        self._ended = threading.Event()
        self._cancelled = False
        self._error: TransportError | None = None

    def poll(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> None:
        if self._help_with is not None and timeout_s > 0:
            self._help_with(self)
        if not self._ended.wait(max(0.0, timeout_s)):
            raise TransferTimeoutError(f"a transfer has not ended within {timeout_s:g} s")
        if self._error is not None:
            # A copy, so that two waiting threads do not write to one traceback.
            raise type(self._error)(*self._error.args)

    def cancel(self) -> bool:
        if self._ended.is_set():
            return False
        self._cancelled = True
        self._interrupt(self)
        self._ended.wait()
        return isinstance(self._error, TransferCancelledError)

    def check(self) -> None:
        """Raise if the transfer was cancelled; called by the thread that copies.

        Raises:
            TransferCancelledError: The transfer was cancelled.
        """
        if self._cancelled:
            raise TransferCancelledError("the transfer was cancelled")

    def end(self, error: TransportError | None) -> None:
        """End the transfer, with an error or None, and wake the waiting threads."""
        self._error = error
        self.plan = self.plan._replace(local=self.plan.local._replace(owner=None))
        self._ended.set()


class CopyThread:
    """Thread that executes plans in the order of their submission.

    Args:
        name: Name of the thread.
        carry_out: Function that copies all bytes of a ticket's plan. It calls ``ticket.check()``
            between slices and raises a TransportError on failure.
        break_off: Function that makes a ``carry_out`` that waits for the peer fail with
            PeerGoneError. It is called from any thread, if a cancelled transfer does not stop.
        waiters_help: True to let the thread that waits for the next ticket execute its plan itself
            if it is small: this saves two thread switches, each of which waits for a core and the
            GIL. Only allowed if ``carry_out`` never waits for the peer.
    """

    def __init__(
        self,
        name: str,
        carry_out: Callable[[PlanTicket], None],
        break_off: Callable[[], None],
        *,
        waiters_help: bool = False,
    ) -> None:
        self._waiters_help = waiters_help
        self._carry_out = carry_out
        self._break_off = break_off
        self._changed = threading.Condition()
        self._waiting: deque[PlanTicket] = deque()
        self._current: PlanTicket | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, plan: Plan) -> PlanTicket:
        """Queue a plan.

        Raises:
            PeerGoneError: The thread was closed.
        """
        helps = self._waiters_help and plan.total_bytes <= MAX_HELP_BYTES
        ticket = PlanTicket(plan, self._interrupt, self._help if helps else None)
        with self._changed:
            if self._closed:
                raise PeerGoneError("the region is closed")
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def close(self) -> None:
        """Cancel all transfers and end the thread."""
        with self._changed:
            self._closed = True
            tickets = [*self._waiting, *([self._current] if self._current else [])]
            self._changed.notify_all()
        for ticket in tickets:
            ticket.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _interrupt(self, ticket: PlanTicket) -> None:
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                ticket.end(TransferCancelledError("the transfer was cancelled"))
                return
            stopped = self._changed.wait_for(
                lambda: self._current is not ticket, timeout=CANCEL_WAIT_S
            )
        if not stopped:
            self._break_off()

    def _run(self) -> None:
        while (ticket := self._next()) is not None:
            self._do(ticket)

    def _help(self, ticket: PlanTicket) -> None:
        with self._changed:
            if self._current is not None or not self._waiting or self._waiting[0] is not ticket:
                return
            self._current = self._waiting.popleft()
        self._do(ticket)

    def _do(self, ticket: PlanTicket) -> None:
        error: TransportError | None = PeerGoneError("the transfer was broken off")
        try:
            ticket.check()
            self._carry_out(ticket)
            error = None
        except TransportError as raised:
            error = raised
        except Exception as raised:
            error = PeerGoneError(f"the transfer failed: {raised!r}")
        finally:
            # A signal may end a waiting thread that executes the plan: others must not wait for it.
            self._finish(ticket, error)

    def _next(self) -> PlanTicket | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_next() or self._closed)
            if not self._is_next():
                return None
            self._current = self._waiting.popleft()
            return self._current

    def _is_next(self) -> bool:
        return bool(self._waiting) and self._current is None

    def _finish(self, ticket: PlanTicket, error: TransportError | None) -> None:
        with self._changed:
            self._current = None
            ticket.end(error)
            self._changed.notify_all()
