"""Transports whose bytes are moved by a library, with grants over a channel of this package.

For each slice the peer asks for a grant, moves the bytes, and gives the grant back. While a grant
is held, the region's ``advance`` to another epoch does not return. The library's own connections
are not signed: use these transports on a network that only these machines can reach.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack

from banaserve.base.errors import ProtocolError
from banaserve.transport.backends.channel_served import (
    FOREVER_S,
    Begin,
    ChannelRegion,
    ChannelTransport,
    End,
    Granted,
    answer,
    ask,
    checked_runs,
    denial_of,
    offsets_of,
    request_in,
)
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.errors import RefusedError, TransferTimeoutError
from banaserve.transport.interface import Message
from banaserve.transport.memory import (
    SLICE_BYTES,
    CopyRuns,
    Memory,
    Plan,
    copy_runs,
    gather,
    scatter,
)
from banaserve.transport.regions.descriptor import RegionDescriptor
from banaserve.transport.regions.offered_region import OfferedRegion
from banaserve.transport.regions.remote_region import RemoteRegion, Ticket


class Mover(ABC):
    """Mover of bytes: one side of one connection of the library."""

    def connect(self, check_peer: Callable[[], None]) -> None:
        """Finish connecting, after the answer to Open is on its way. Blocks.

        Raises:
            PeerGoneError: The peer is gone, by ``check_peer``, or the sides cannot connect.
        """
        return

    @abstractmethod
    def move(self, part: Plan, check_peer: Callable[[], None]) -> None:
        """Perform this side's part of the copy of a slice.

        Args:
            part: Slice to copy.
            check_peer: Check that raises PeerGoneError if the other process is gone.

        Raises:
            TransportError: The copy failed.
        """

    def abort(self) -> None:
        """Make a ``move`` under way fail, from any thread."""
        return

    @abstractmethod
    def close(self) -> None:
        """Close the library's connection."""


class GrantedTransport(ChannelTransport):
    """Base of transports with grants, whose ``_accept`` and ``_meet`` make the sides' movers."""

    @abstractmethod
    def _accept(self, region: OfferedRegion) -> tuple[Mover, bytes]:
        """Return the offering side's mover, and the data that the peer needs to connect."""

    @abstractmethod
    def _meet(self, data: bytes, staging: Memory, check_peer: Callable[[], None]) -> Mover:
        """Return the opening side's mover, which moves bytes between the peer and ``staging``.

        Args:
            data: Data that the offering side's ``_accept`` returned.
            staging: Memory through which slices pass.
            check_peer: Check that raises PeerGoneError if the other process is gone, and
                TransferTimeoutError if connecting takes too long.
        """

    def _join(
        self, descriptor: RegionDescriptor, channel: StreamChannel, data: bytes, deadline: float
    ) -> RemoteRegion:
        staging = self._reserve_memory(SLICE_BYTES)

        def check_peer() -> None:
            channel.check_peer()
            if time.monotonic() > deadline:
                raise TransferTimeoutError(f"{self.name} has not connected in time")

        mover = self._meet(data, staging, check_peer)
        copy = copy_runs if self._gpu is None else self._gpu.copy_runs
        return GrantedRemote(descriptor, self.forget_opened, channel, staging, mover, copy)

    def _serve_region(
        self, channel: StreamChannel, opening: Message, region: OfferedRegion
    ) -> None:
        mover, data = self._accept(region)
        try:
            answer(channel, opening, Granted(data))
            mover.connect(channel.check_peer)
            _give_grants(channel, region, mover)
        finally:
            mover.close()


class GrantedRemote(ChannelRegion):
    """Region of a peer, whose staging memory is given to the library once."""

    def __init__(
        self,
        descriptor: RegionDescriptor,
        forget: Callable[[RemoteRegion], bool],
        channel: StreamChannel,
        staging: Memory,
        mover: Mover,
        copy: CopyRuns,
    ) -> None:
        self._mover = mover
        self._copy = copy
        super().__init__(descriptor, forget, channel, staging)

    def _disconnect(self) -> None:
        super()._disconnect()
        self._mover.close()

    def _break_off(self) -> None:
        super()._break_off()
        self._mover.abort()

    def _copy_slices(self, ticket: Ticket) -> None:
        staged = self._staging
        for part in ticket.plan.slices():
            ticket.check()
            begin = Begin(part.epoch, part.num_bytes, part.writes)
            ask(self._channel, begin, offsets_of(part))
            if part.writes:
                gather(staged, part.local, part.local_offsets, part.num_bytes, self._copy)
            self._mover.move(part, self._channel.check_peer)
            ask(self._channel, End())
            if not part.writes:
                scatter(part.local, part.local_offsets, staged, part.num_bytes, self._copy)


def _give_grants(channel: StreamChannel, region: OfferedRegion, mover: Mover) -> None:
    while True:
        request = channel.receive(FOREVER_S)
        begin = request_in(request)
        if not isinstance(begin, Begin) or len(request.tensors) != 1:
            raise ProtocolError("a grant begins with Begin")
        with ExitStack() as held:
            try:
                runs = checked_runs(begin, request.tensors[0], region)
                held.enter_context(region.store.use(begin.epoch))
            except RefusedError as error:
                answer(channel, request, denial_of(error))
                continue
            answer(channel, request, Granted())
            part = Plan(region.memory, runs, runs, begin.num_bytes, begin.epoch, begin.writes)
            mover.move(part, channel.check_peer)
            request = channel.receive(FOREVER_S)
            if not isinstance(request_in(request), End):
                raise ProtocolError("a grant ends with End")
        answer(channel, request, Granted())
