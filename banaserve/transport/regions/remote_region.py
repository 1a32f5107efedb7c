"""Opened regions of a peer, and the tickets of their transfers."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from banaserve.base.clock import wait_parts
from banaserve.transport.errors import (
    PeerGoneError,
    TransferCancelledError,
    TransferTimeoutError,
    TransportError,
)
from banaserve.transport.memory import Memory, Plan
from banaserve.transport.regions.descriptor import Offsets, RegionDescriptor, check_range, make_plan

CANCEL_WAIT_S = 1.0
MAX_HELP_BYTES = 64 * 2**20
"""Maximum size of a transfer that the waiting thread may copy itself. A larger transfer is left to
the copy thread, because the waiting thread has a deadline."""


class Ticket:
    """Ticket of the submitted transfer ``plan``."""

    def __init__(self, plan: Plan, region: RemoteRegion, *, may_help: bool) -> None:
        self.plan = plan
        self._region = region
        self._may_help = may_help
        self._ended = threading.Event()
        self._cancelled = False
        self._error: TransportError | None = None

    def poll(self) -> bool:
        """Return whether the transfer has ended or failed; never waits and never raises."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> None:
        """Wait until all bytes are copied.

        Raises:
            TransferTimeoutError: The transfer has not ended yet; it continues.
            PeerGoneError: The peer has died or broken the connection.
            RefusedError: The region refuses the transfer; StaleEpochError if the epoch is the
                reason.
            TransferCancelledError: The transfer was cancelled.
        """
        if self._may_help and timeout_s > 0:
            self._region.help_with(self)
        if not any(self._ended.wait(part_s) for part_s in wait_parts(timeout_s)):
            raise TransferTimeoutError(f"a transfer has not ended within {timeout_s:g} s")
        if self._error is not None:
            # A copy, so that two waiting threads do not write to one traceback.
            raise type(self._error)(*self._error.args)

    def cancel(self) -> bool:
        """Cancel; return when local memory is no longer touched, within about a second.

        Cancelling in the middle of a run may cost the connection: then the next submit raises
        PeerGoneError and the region has to be opened again.

        Returns:
            False if the transfer had ended before.
        """
        if self._ended.is_set():
            return False
        self._cancelled = True
        self._region.interrupt(self)
        self._ended.wait()
        return isinstance(self._error, TransferCancelledError)

    def check(self) -> None:
        """Raise TransferCancelledError after a cancellation; called by the thread that copies."""
        if self._cancelled:
            raise TransferCancelledError("the transfer was cancelled")

    def end(self, error: TransportError | None) -> None:
        """End the transfer, with an error or None, and wake the waiting threads."""
        self._error = error
        self.plan = self.plan._replace(local=self.plan.local._replace(owner=None))
        self._ended.set()


class RemoteRegion(ABC):
    """Region of a peer, whose transfers one thread executes in the order of their submission.

    Any thread may submit. Offsets are in bytes; run ``i`` of a transfer copies ``num_bytes``
    between ``local_offsets[i]`` of ``local`` and ``remote_offsets[i]`` of the region. If runs of
    one submission overlap in their target, the bytes of either run remain there.

    Args:
        forget: Function that removes the region from the transport's table; returns False if it
            was removed before.

    Attributes:
        never_waits_for_peer: True if copies end without any action of the peer. Then a thread that
            waits for the next ticket executes its plan itself if it is small: this saves two thread
            switches, each of which waits for a core and the GIL.
    """

    never_waits_for_peer = False

    def __init__(
        self, descriptor: RegionDescriptor, forget: Callable[[RemoteRegion], bool]
    ) -> None:
        self.descriptor = descriptor
        self._forget = forget
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._current: Ticket | None = None
        self._closed = False
        name = f"transport-{descriptor.transport}-copy"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit_write(
        self,
        local: Memory,
        local_offsets: Offsets,
        remote_offsets: Offsets,
        num_bytes: int,
        epoch: int,
    ) -> Ticket:
        """Begin to copy to the peer. ``local`` must not change until the ticket has ended.

        Raises:
            RefusedError: A run is out of bounds on either side, or the numbers of offsets differ.
            PeerGoneError: The peer is already known to be gone.
        """
        runs = local_offsets, remote_offsets, num_bytes
        return self._submit(make_plan(self.descriptor, local, *runs, epoch, writes=True))

    def submit_read(
        self,
        local: Memory,
        local_offsets: Offsets,
        remote_offsets: Offsets,
        num_bytes: int,
        epoch: int,
    ) -> Ticket:
        """Begin to copy from the peer into ``local``, which must be writable.

        Raises:
            RefusedError: ``local`` is read-only, or see ``submit_write``.
            PeerGoneError: The peer is already known to be gone.
        """
        runs = local_offsets, remote_offsets, num_bytes
        return self._submit(make_plan(self.descriptor, local, *runs, epoch, writes=False))

    def warm(self, first_byte: int, num_bytes: int) -> None:
        """Allocate the pages of a range if memory is shared, to avoid page faults in copies.

        Raises:
            RefusedError: The range is outside the region.
        """
        check_range(first_byte, num_bytes, self.descriptor.num_bytes)

    def close(self) -> None:
        """Cancel the transfers under way and close the region."""
        if not self._forget(self):
            return
        with self._changed:
            self._closed = True
            tickets = [*self._waiting, *([self._current] if self._current else [])]
            self._changed.notify_all()
        for ticket in tickets:
            ticket.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._disconnect()

    @abstractmethod
    def _carry_out(self, ticket: Ticket) -> None:
        """Copy the runs of the ticket's plan, in the copy thread or a thread that waits for it.

        It calls ``ticket.check`` between slices.
        """

    @abstractmethod
    def _disconnect(self) -> None:
        """End the connection to the peer, after the last copy."""

    def _break_off(self) -> None:
        """Make a ``_carry_out`` that waits for the peer fail soon, from any thread."""
        return

    def _submit(self, plan: Plan) -> Ticket:
        may_help = self.never_waits_for_peer and plan.total_bytes <= MAX_HELP_BYTES
        ticket = Ticket(plan, self, may_help=may_help)
        with self._changed:
            if self._closed:
                raise PeerGoneError("the region is closed")
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def interrupt(self, ticket: Ticket) -> None:
        """End a cancelled transfer that waits; break the connection off if it does not stop."""
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

    def help_with(self, ticket: Ticket) -> None:
        """Carry a transfer out in the calling thread if it is the next one."""
        with self._changed:
            if self._current is not None or not self._waiting or self._waiting[0] is not ticket:
                return
            self._current = self._waiting.popleft()
        self._do(ticket)

    def _run(self) -> None:
        while (ticket := self._next()) is not None:
            self._do(ticket)

    def _do(self, ticket: Ticket) -> None:
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

    def _next(self) -> Ticket | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_next() or self._closed)
            if not self._is_next():
                return None
            self._current = self._waiting.popleft()
            return self._current

    def _is_next(self) -> bool:
        return bool(self._waiting) and self._current is None

    def _finish(self, ticket: Ticket, error: TransportError | None) -> None:
        with self._changed:
            self._current = None
            ticket.end(error)
            self._changed.notify_all()
