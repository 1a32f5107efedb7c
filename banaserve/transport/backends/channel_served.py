"""Base of transports with a channel for each opened region, and the messages about its slices."""

from __future__ import annotations

import socket
import time
from abc import abstractmethod
from collections.abc import Callable

import msgspec
import numpy as np

from banaserve.base.errors import ProtocolError
from banaserve.base.net.framing import decode
from banaserve.transport.backends.offering import OfferingTransport
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.channels.connect import connect_tcp, over_tcp, tcp_address
from banaserve.transport.channels.threaded_server import GREETING_S, listen_tcp
from banaserve.transport.errors import (
    PeerGoneError,
    RefusedError,
    StaleEpochError,
    TransferCancelledError,
)
from banaserve.transport.interface import Message, Tensor, TransportOptions
from banaserve.transport.memory import SLICE_BYTES, Memory, Plan, Runs
from banaserve.transport.regions.argument_checks import check_offsets
from banaserve.transport.regions.descriptor import RegionDescriptor
from banaserve.transport.regions.gpu_memory import CudaGpu
from banaserve.transport.regions.offered_region import OfferedRegion, PrivateMemory, reserve
from banaserve.transport.regions.remote_region import RemoteRegion, Ticket

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


class ChannelTransport(OfferingTransport):
    """Base of transports whose offering side answers on a TCP port, to peers that know the secret.

    Args:
        gpu: GPU in whose memory regions are offered; None for memory of the host.
    """

    def __init__(self, options: TransportOptions, gpu: CudaGpu | None = None) -> None:
        super().__init__(options)
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
        return listener, tcp_address(listener)

    def _reserve(self, descriptor: RegionDescriptor) -> OfferedRegion:
        memory = self._reserve_memory(descriptor.num_bytes)
        store = PrivateMemory(memory, descriptor.epoch, self._gpu)
        return OfferedRegion(descriptor, store, self.forget_offered)

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
        opening = channel.receive(FOREVER_S)
        request = request_in(opening)
        region = self._find(request.region_id) if isinstance(request, Open) else None
        if region is None:
            answer(channel, opening, Denied(False, "the peer does not offer this region any more"))
        else:
            self._serve_region(channel, opening, region)


class ChannelRegion(RemoteRegion):
    """Region of a peer at the other end of a channel, which is of no use after a failure.

    Args:
        staging: Memory through which slices pass.
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
    """Return the request in a message.

    Raises:
        ProtocolError: There is none.
    """
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
    """Send a request to the offering side and return the data of its grant, see ``grant_in``.

    Raises:
        TransferTimeoutError: There is no answer in time.
        PeerGoneError: The peer is gone.
    """
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
