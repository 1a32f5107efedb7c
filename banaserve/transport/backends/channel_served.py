"""Bases of transports with a channel for each opened region, and the messages about its slices.

``GrantedTransport`` is the base of those whose bytes are moved by a library. For each slice the
peer asks for a grant, moves the bytes, and gives the grant back. While a grant is held, the
region's ``advance`` to another epoch does not return. The library's own connections are not signed:
use these transports on a network that only these machines can reach.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import numpy as np

from banaserve.base.errors import ProtocolError
from banaserve.base.net.framing import decode
from banaserve.base.net.sockets import keep_alive
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.channels.connect import connect_tcp, over_tcp, tcp_address
from banaserve.transport.errors import (
    PeerGoneError,
    RefusedError,
    StaleEpochError,
    TransferCancelledError,
    TransferTimeoutError,
)
from banaserve.transport.interface import Message, Tensor, Transport, TransportOptions
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
from banaserve.transport.regions.descriptor import RegionDescriptor, check_offsets
from banaserve.transport.regions.gpu_memory import CudaGpu
from banaserve.transport.regions.offered_region import OfferedRegion, PrivateMemory, reserve
from banaserve.transport.regions.remote_region import RemoteRegion, Ticket
from banaserve.transport.threaded_server import (
    GREETING_S,
    MAX_STRANGERS,
    ConnectionPlaces,
    listen_tcp,
)

# Only waiting for a ticket has a deadline; the connection itself has none.
FOREVER_S = 1e6


class _Struct(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class Open(_Struct, frozen=True, tag="open"):
    region_id: bytes


class Begin(_Struct, frozen=True, tag="begin"):
    """Request for a slice, whose offsets are the message's first tensor."""

    epoch: int
    num_bytes: int
    writes: bool


class End(_Struct, frozen=True, tag="end"):
    """End of a slice whose bytes a library has moved."""


class Granted(_Struct, frozen=True, tag="granted"):
    """Consent; ``data`` is the answer to an Open: the data that a library needs to connect."""

    data: bytes = b""


class Denied(_Struct, frozen=True, tag="denied"):
    stale: bool
    reason: str


SliceRequest = Open | Begin | End
_requests: msgspec.msgpack.Decoder[SliceRequest] = msgspec.msgpack.Decoder(SliceRequest)
_answers: msgspec.msgpack.Decoder[Granted | Denied] = msgspec.msgpack.Decoder(Granted | Denied)


class ChannelTransport(Transport):
    """Base of transports whose offering side answers on a TCP port, to peers that know the secret.

    Regions are offered in memory of ``gpu``, or of the host if it is None.
    """

    def __init__(self, options: TransportOptions, gpu: CudaGpu | None = None) -> None:
        super().__init__(options)
        self._places = ConnectionPlaces(num_strangers=MAX_STRANGERS)
        self._gpu = gpu

    @abstractmethod
    def _serve_region(
        self, channel: StreamChannel, opening: Message, region: OfferedRegion
    ) -> None:
        """Grant ``opening``, then serve one peer's slices until it closes."""

    @abstractmethod
    def _join(
        self, descriptor: RegionDescriptor, channel: StreamChannel, data: bytes, deadline: float
    ) -> RemoteRegion:
        """Return the opened region after the offering side has granted it with ``data``."""

    def _listen(self) -> tuple[socket.socket, str]:
        listener = listen_tcp(self._options.host)
        keep_alive(listener)
        return listener, tcp_address(listener)

    def _reserve(self, num_bytes: int, epoch: int) -> PrivateMemory:
        return PrivateMemory(self._reserve_memory(num_bytes), epoch, self._gpu)

    def _reserve_memory(self, num_bytes: int) -> Memory:
        return reserve(num_bytes) if self._gpu is None else self._gpu.reserve(num_bytes)

    def _connect(self, descriptor: RegionDescriptor, timeout_s: float) -> RemoteRegion:
        deadline = time.monotonic() + timeout_s
        sock = connect_tcp(descriptor.address.removeprefix("tcp:"), timeout_s)
        channel = over_tcp(sock, self._options.secret, deadline, listening=False)
        try:
            left_s = deadline - time.monotonic()
            data = ask(channel, Open(descriptor.region_id), timeout_s=left_s)
            return self._join(descriptor, channel, data, deadline)
        except BaseException:
            channel.close()
            raise

    def _serve(self, sock: socket.socket) -> None:
        deadline = time.monotonic() + GREETING_S
        channel = over_tcp(sock, self._options.secret, deadline, listening=True)
        if not self._places.proved(sock):
            return
        opening = channel.receive(FOREVER_S)
        request = request_in(opening)
        region = self._find(request.region_id) if isinstance(request, Open) else None
        if region is None:
            answer(channel, opening, Denied(False, "the peer does not offer this region any more"))
        else:
            self._serve_region(channel, opening, region)


class ChannelRegion(RemoteRegion):
    """Region of a peer at the other end of a channel, which is of no use after a failure.

    Slices pass through the memory ``staging``.
    """

    def __init__(
        self,
        descriptor: RegionDescriptor,
        forget: Callable[[RemoteRegion], bool],
        channel: StreamChannel,
        staging: Memory,
    ) -> None:
        self._channel = channel
        self._staging = staging
        self._broken = False
        super().__init__(descriptor, forget)

    @abstractmethod
    def _copy_slices(self, ticket: Ticket) -> None:
        """Copy the slices of the ticket's plan, see ``_carry_out``."""

    def _carry_out(self, ticket: Ticket) -> None:
        if self._broken:
            raise PeerGoneError("the connection was broken off: open the region again")
        try:
            self._copy_slices(ticket)
        except (RefusedError, TransferCancelledError):
            raise
        except Exception as error:  # of any kind: answers may be left, which the next would take
            self._broken = True
            self._channel.close()
            ticket.check()
            raise PeerGoneError(str(error)) from None

    def _disconnect(self) -> None:
        self._channel.close()

    def _break_off(self) -> None:
        self._channel.abort()


def message_of(said: SliceRequest | Granted | Denied, *tensors: Tensor) -> Message:
    """Return the message with ``said`` as its body."""
    return Message(msgspec.msgpack.encode(said), tensors)


def offsets_of(part: Plan) -> Tensor:
    """Return the offsets of a slice's runs in the region as a tensor."""
    runs = part.remote_offsets
    return Tensor("int64", runs.shape, runs.view(np.uint8))


def request_in(message: Message) -> SliceRequest:
    """Return the request in a message; raise ProtocolError if there is none."""
    return decode(_requests, message.body)


def grant_in(message: Message) -> bytes:
    """Return the data of the grant in an answer.

    Raises:
        RefusedError: The request was denied; StaleEpochError if the epoch is the reason.
        PeerGoneError: The peer breaks the protocol.
    """
    try:
        found = decode(_answers, message.body)
    except ProtocolError as error:
        raise PeerGoneError(f"the peer breaks the protocol: {error}") from None
    if isinstance(found, Denied):
        raise (StaleEpochError if found.stale else RefusedError)(found.reason)
    return found.data


def ask(
    channel: StreamChannel, request: SliceRequest, *tensors: Tensor, timeout_s: float = FOREVER_S
) -> bytes:
    """Send a request to the offering side; return the data of its grant, see ``grant_in``."""
    return grant_in(channel.call(message_of(request, *tensors), timeout_s))


def answer(channel: StreamChannel, request: Message, said: Granted | Denied) -> None:
    """Answer a request of ``ask``."""
    channel.reply(request, message_of(said), FOREVER_S)


def denial_of(error: RefusedError) -> Denied:
    """Return the answer that raises ``error`` at the peer."""
    return Denied(isinstance(error, StaleEpochError), str(error))


def checked_runs(begin: Begin, offsets: Tensor, region: OfferedRegion) -> Runs:
    """Return the offsets of a peer's slice, ``[num_runs]`` int64, all within the region.

    Raises:
        RefusedError: They are not, or the slice is too large.
    """
    if offsets.dtype != "int64" or len(offsets.shape) != 1:
        raise RefusedError("offsets are int64 of one dimension")
    runs = offsets.data.view(np.int64)
    if begin.num_bytes < 0 or begin.num_bytes * runs.size > SLICE_BYTES:
        raise RefusedError("a slice is too large")
    return check_offsets(runs, begin.num_bytes, region.descriptor.num_bytes, "the region")


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

        ``check_peer`` raises PeerGoneError if the other process is gone.
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

        ``data`` is that of the offering side's ``_accept``. ``check_peer`` raises PeerGoneError if
        the other process is gone, and TransferTimeoutError if connecting takes too long.
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
            del part  # or the memory would outlive its region until the peer closes
        answer(channel, request, Granted())
