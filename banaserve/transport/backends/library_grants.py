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

import msgspec
import numpy as np

from banaserve.base.errors import ProtocolError
from banaserve.base.net.framing import decode
from banaserve.transport.backends.tcp_offering import ServedTransport
from banaserve.transport.channels.authentication import Seal
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.channels.stream import SocketStream
from banaserve.transport.errors import (
    PeerGoneError,
    RefusedError,
    StaleEpochError,
    TransferTimeoutError,
)
from banaserve.transport.interface import Message, RegionDescriptor, Tensor
from banaserve.transport.memory import (
    SLICE_BYTES,
    CopyRuns,
    Memory,
    Plan,
    Runs,
    copy_runs,
    gather,
    scatter,
)
from banaserve.transport.regions.argument_checks import check_offsets
from banaserve.transport.regions.local_region import LocalRegion
from banaserve.transport.regions.remote_region import PlannedRegion, PlanTicket

# Only waiting for a ticket has a deadline; the connection itself has none.
FOREVER_S = 1e6


class _Struct(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class Open(_Struct, frozen=True, tag="open"):
    region_id: bytes


class Begin(_Struct, frozen=True, tag="begin"):
    """Request for the grant of a slice, whose offsets are the message's tensor."""

    epoch: int
    num_bytes: int
    writes: bool


class End(_Struct, frozen=True, tag="end"):
    pass


class Granted(_Struct, frozen=True, tag="granted"):
    """Grant; ``data`` is the answer to an Open: the data that the library needs to connect."""

    data: bytes = b""


class Denied(_Struct, frozen=True, tag="denied"):
    stale: bool
    reason: str


_requests: msgspec.msgpack.Decoder[Open | Begin | End] = msgspec.msgpack.Decoder(Open | Begin | End)
_answers: msgspec.msgpack.Decoder[Granted | Denied] = msgspec.msgpack.Decoder(Granted | Denied)


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


class GrantedTransport(ServedTransport):
    """Base of transports with grants, whose ``_accept`` and ``_join`` make the sides' movers."""

    @abstractmethod
    def _accept(self, region: LocalRegion) -> tuple[Mover, bytes]:
        """Return the offering side's mover, and the data that the peer needs to connect."""

    @abstractmethod
    def _join(self, data: bytes, staging: Memory, check_peer: Callable[[], None]) -> Mover:
        """Return the opening side's mover, which moves bytes between the peer and ``staging``.

        Args:
            data: Data that the offering side's ``_accept`` returned.
            staging: Memory through which slices pass.
            check_peer: Check that raises PeerGoneError if the other process is gone, and
                TransferTimeoutError if connecting takes too long.
        """

    def _open(
        self, descriptor: RegionDescriptor, stream: SocketStream, seal: Seal, deadline: float
    ) -> PlannedRegion:
        channel = StreamChannel(stream, seal)
        data = ask(channel, Open(descriptor.region_id))
        staging = self._reserve(SLICE_BYTES)

        def check_peer() -> None:
            stream.check_peer()
            if time.monotonic() > deadline:
                raise TransferTimeoutError(f"{self.name} has not connected in time")

        mover = self._join(data, staging, check_peer)
        copy = copy_runs if self._gpu is None else self._gpu.copy_runs
        return GrantedRemote(self, descriptor, stream, channel, mover, staging, copy)

    def _serve(self, stream: SocketStream, seal: Seal) -> None:
        channel = StreamChannel(stream, seal)
        request = channel.receive(FOREVER_S)
        message = decode(_requests, request.body)
        region = self._find(message.region_id) if isinstance(message, Open) else None
        if region is None:
            _answer(channel, request, Denied(False, "the peer does not offer this region any more"))
            return
        mover, data = self._accept(region)
        try:
            _answer(channel, request, Granted(data))
            mover.connect(stream.check_peer)
            _give_grants(channel, stream, region, mover)
        finally:
            mover.close()


class GrantedRemote(PlannedRegion):
    """Region of a peer. Slices pass through ``staging``, which is given to the library once."""

    def __init__(
        self,
        transport: GrantedTransport,
        descriptor: RegionDescriptor,
        stream: SocketStream,
        channel: StreamChannel,
        mover: Mover,
        staging: Memory,
        copy: CopyRuns,
    ) -> None:
        self._transport = transport
        self._stream = stream
        self._channel = channel
        self._mover = mover
        self._staging = staging
        self._copy = copy
        self._broken = False
        super().__init__(descriptor)

    def close(self) -> None:
        if self._transport.forget(self):
            super().close()
            self._channel.close()
            self._mover.close()

    def _break_off(self) -> None:
        self._stream.abort()
        self._mover.abort()

    def _carry_out(self, ticket: PlanTicket) -> None:
        if self._broken:
            raise PeerGoneError("the connection was broken off: open the region again")
        staged = self._staging
        try:
            for part in ticket.plan.slices():
                ticket.check()
                begin = Begin(part.epoch, part.num_bytes, part.writes)
                ask(self._channel, begin, part.remote_offsets)
                if part.writes:
                    gather(staged, part.local, part.local_offsets, part.num_bytes, self._copy)
                self._mover.move(part, self._stream.check_peer)
                ask(self._channel, End())
                if not part.writes:
                    scatter(part.local, part.local_offsets, staged, part.num_bytes, self._copy)
        except (PeerGoneError, RuntimeError) as error:
            self._broken = True
            self._channel.close()
            ticket.check()
            raise PeerGoneError(str(error)) from None


def ask(channel: StreamChannel, request: Open | Begin | End, offsets: Runs | None = None) -> bytes:
    """Send a request to the offering side and return the data of its grant.

    Raises:
        RefusedError: The request was denied; StaleEpochError if the epoch is the reason.
        PeerGoneError: The peer is gone, or breaks the protocol.
    """
    tensors = () if offsets is None else (Tensor("int64", offsets.shape, offsets.view(np.uint8)),)
    reply = channel.call(Message(msgspec.msgpack.encode(request), tensors), FOREVER_S)
    try:
        answer = decode(_answers, reply.body)
    except ProtocolError as error:
        raise PeerGoneError(f"the peer breaks the protocol: {error}") from None
    if isinstance(answer, Denied):
        raise (StaleEpochError if answer.stale else RefusedError)(answer.reason)
    return answer.data


def _give_grants(
    channel: StreamChannel, stream: SocketStream, region: LocalRegion, mover: Mover
) -> None:
    while True:
        request = channel.receive(FOREVER_S)
        begin = decode(_requests, request.body)
        if not isinstance(begin, Begin) or len(request.tensors) != 1:
            raise ProtocolError("a grant begins with Begin")
        with ExitStack() as held:
            try:
                part = _checked(begin, request.tensors[0], region)
                held.enter_context(region.use(begin.epoch))
            except RefusedError as error:
                _answer(channel, request, Denied(isinstance(error, StaleEpochError), str(error)))
                continue
            _answer(channel, request, Granted())
            mover.move(part, stream.check_peer)
            request = channel.receive(FOREVER_S)
            if not isinstance(decode(_requests, request.body), End):
                raise ProtocolError("a grant ends with End")
        _answer(channel, request, Granted())


def _checked(begin: Begin, offsets: Tensor, region: LocalRegion) -> Plan:
    if offsets.dtype != "int64" or len(offsets.shape) != 1:
        raise RefusedError("offsets are int64 of one dimension")
    runs = offsets.data.view(np.int64)
    if begin.num_bytes < 0 or begin.num_bytes * runs.size > SLICE_BYTES:
        raise RefusedError("a slice is too large")
    runs = check_offsets(runs, begin.num_bytes, region.descriptor.num_bytes, "the region")
    return Plan(region.memory, runs, runs, begin.num_bytes, begin.epoch, begin.writes)


def _answer(channel: StreamChannel, request: Message, answer: Granted | Denied) -> None:
    channel.reply(request, Message(msgspec.msgpack.encode(answer)), FOREVER_S)
