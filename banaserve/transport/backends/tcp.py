"""TCP transport: slices are received by a thread of the offering side, checked, and copied.

Each slice is a message of the region's channel, whose code covers offsets and bytes: a third party
can forge neither. A wrong code ends the connection before bytes reach a region. Bytes are checked
while they are in the cache, where a code costs hardly more than a checksum: 0.043 instead of 0.031
seconds of a core for each GiB.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from banaserve.base.errors import ProtocolError
from banaserve.transport.backends.channel_served import (
    FOREVER_S,
    Begin,
    ChannelRegion,
    ChannelTransport,
    Denied,
    Granted,
    answer,
    checked_runs,
    denial_of,
    grant_in,
    message_of,
    offsets_of,
    request_in,
)
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.errors import PeerGoneError, RefusedError, TransportError
from banaserve.transport.interface import Bytes, Message, Tensor
from banaserve.transport.memory import SLICE_BYTES, Memory, Plan, gather, scatter
from banaserve.transport.regions.descriptor import RegionDescriptor
from banaserve.transport.regions.offered_region import OfferedRegion, reserve
from banaserve.transport.regions.remote_region import RemoteRegion, Ticket

NAME = "tcp"
# Number of slices under way: the peer checks one while the next is sent.
_WINDOW = 3
# While the peer sends the bytes of a read, it reads no further request: the requests sent ahead
# must fit into the kernel's buffers, otherwise both sides would wait for each other.
_MAX_RUNS_AHEAD = 2048
MAX_SLICE_MESSAGE_BYTES = 9 * SLICE_BYTES
"""Maximum size of a slice and its offsets, which take eight bytes for a run of one byte."""
_NO_BYTES: Bytes = np.empty(0, np.uint8)


class TcpTransport(ChannelTransport):
    """Transport over TCP, with one connection for each region that a peer opens."""

    name = NAME

    def _join(
        self, descriptor: RegionDescriptor, channel: StreamChannel, data: bytes, deadline: float
    ) -> RemoteRegion:
        return TcpRemote(descriptor, self.forget_opened, channel, reserve(SLICE_BYTES))

    def _serve_region(
        self, channel: StreamChannel, opening: Message, region: OfferedRegion
    ) -> None:
        answer(channel, opening, Granted())
        _Responder(channel, region).run()


class _Responder:
    """Executor of one peer's slices on one region."""

    def __init__(self, channel: StreamChannel, region: OfferedRegion) -> None:
        self._channel = channel
        self._region = region
        self._bytes = reserve(SLICE_BYTES).view()

    def run(self) -> None:
        while True:
            message = self._channel.receive(FOREVER_S, self._place)
            begin = request_in(message)
            if not isinstance(begin, Begin) or len(message.tensors) != 1 + begin.writes:
                raise ProtocolError("a slice begins with Begin, its offsets, and bytes to write")
            said, data = self._do(begin, *message.tensors)
            self._channel.send(message_of(said, *data), FOREVER_S)

    def _place(self, body: bytes, sizes: Sequence[int]) -> Sequence[Bytes]:
        """Receive bytes to write, the second tensor, into this responder's memory."""
        if sum(sizes) > MAX_SLICE_MESSAGE_BYTES:
            raise ProtocolError("a slice is too large")
        return [_NO_BYTES, self._bytes[: sizes[1]]] if len(sizes) == 2 else []

    def _do(
        self, begin: Begin, offsets: Tensor, written: Tensor | None = None
    ) -> tuple[Granted | Denied, list[Tensor]]:
        """Write bytes to the region, or read them from there; return the answer."""
        region = self._region
        try:
            runs = checked_runs(begin, offsets, region)
            data = self._bytes[: begin.num_bytes * runs.size] if written is None else written.data
            if data.size != begin.num_bytes * runs.size:
                raise ProtocolError("a slice without its bytes")
            with region.store.use(begin.epoch):
                if written is None:
                    gather(Memory.of(data), region.memory, runs, begin.num_bytes)
                else:
                    scatter(region.memory, runs, Memory.of(data), begin.num_bytes)
        except RefusedError as error:
            return denial_of(error), []
        return Granted(), [Tensor("uint8", data.shape, data)] if written is None else []


class TcpRemote(ChannelRegion):
    """Region of a peer at the other end of a channel."""

    def _copy_slices(self, ticket: Ticket) -> None:
        under_way: deque[Plan] = deque()
        failure: TransportError | None = None
        for part in ticket.plan.slices():
            try:
                ticket.check()
                while len(under_way) >= _window(part):
                    self._take_answer(under_way.popleft())
                self._send(part)
            except PeerGoneError:
                raise
            except TransportError as error:
                failure = error
                break
            under_way.append(part)
        failure = self._take_rest(under_way, failure)
        if failure is not None:
            raise failure

    def _take_rest(
        self, under_way: deque[Plan], failure: TransportError | None
    ) -> TransportError | None:
        # Even after a failure, the answers to all requests sent must be read from the channel.
        while under_way:
            try:
                self._take_answer(under_way.popleft())
            except PeerGoneError:
                raise
            except TransportError as error:
                failure = failure or error
        return failure

    def _send(self, part: Plan) -> None:
        tensors = [offsets_of(part)]
        if part.writes:
            # Staged, so that the signed bytes are those sent, even if ``local`` changes meanwhile.
            data = self._staged(part)
            gather(Memory.of(data), part.local, part.local_offsets, part.num_bytes)
            tensors.append(Tensor("uint8", data.shape, data))
        begin = Begin(part.epoch, part.num_bytes, part.writes)
        self._channel.send(message_of(begin, *tensors), FOREVER_S)

    def _take_answer(self, part: Plan) -> None:
        data = self._staged(part)
        message = self._channel.receive(FOREVER_S, lambda body, sizes: [data])
        grant_in(message)
        if not part.writes:
            if [tensor.data.size for tensor in message.tensors] != [data.size]:
                raise PeerGoneError("the peer breaks the protocol: it has sent other bytes")
            read = Memory.of(message.tensors[0].data)
            scatter(part.local, part.local_offsets, read, part.num_bytes)

    @cached_property
    def _bytes(self) -> Bytes:
        return self._staging.view()

    def _staged(self, part: Plan) -> Bytes:
        return self._bytes[: part.local_offsets.size * part.num_bytes]


def _window(part: Plan) -> int:
    return _WINDOW if part.writes or part.remote_offsets.size <= _MAX_RUNS_AHEAD else 1
