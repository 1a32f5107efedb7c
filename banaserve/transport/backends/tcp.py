"""TCP transport: slices are received by a thread of the offering side, checked, and copied.

Each request and each answer is a fixed header with a code over it; the bytes that follow have a
code of their own. A third party can forge neither the target of the bytes nor the bytes: a wrong
code ends the connection before its bytes reach a region. Bytes are checked while they are in the
cache, where a code costs hardly more than a checksum: 0.043 instead of 0.031 seconds of a core for
each GiB.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from banaserve.base.errors import ProtocolError
from banaserve.transport.backends.tcp_offering import ServedTransport
from banaserve.transport.channels.authentication import CODE_BYTES, Seal
from banaserve.transport.channels.stream import SocketStream
from banaserve.transport.errors import (
    PeerGoneError,
    RefusedError,
    StaleEpochError,
    TransportError,
)
from banaserve.transport.interface import MAX_EPOCH, RegionDescriptor
from banaserve.transport.memory import SLICE_BYTES, Memory, Plan, Runs, gather, scatter
from banaserve.transport.regions.argument_checks import check_offsets
from banaserve.transport.regions.local_region import LocalRegion, reserve
from banaserve.transport.regions.remote_region import PlannedRegion, PlanTicket

OPEN, WRITE, READ = range(3)
DONE, OUTSIDE, STALE, CLOSED = range(4)
MAX_RUNS = SLICE_BYTES
_REQUEST = struct.Struct("<BQQQI16s")
_ANSWER = struct.Struct("<BQQ")
NAME = "tcp"
# Number of slices under way: the peer checks one while the next is sent.
_WINDOW = 3
# While the peer sends the bytes of a READ, it reads no further request: the requests sent ahead
# must fit into the kernel's buffers, otherwise both sides would wait for each other.
_MAX_RUNS_AHEAD = 2048
# Only waiting for a ticket has a deadline; the connection itself has none.
_FOREVER_S = 1e6
_NO_ID = bytes(16)
_CHECKED_BYTES = 1 << 18
"""Number of bytes that are received and then checked while they are in the cache."""
_NO_OFFSETS = np.empty(0, np.int64)


class TcpTransport(ServedTransport):
    """Transport over TCP, with one connection for each region that a peer opens."""

    name = NAME

    def _open(
        self, descriptor: RegionDescriptor, stream: SocketStream, seal: Seal, deadline: float
    ) -> PlannedRegion:
        hello = BulkRequest(OPEN, 1, 0, 0, 0, descriptor.region_id)
        stream.write(sign_request(hello, _NO_OFFSETS, seal), deadline)
        stream.wait_readable(deadline)
        try:
            answer = read_answer(stream, seal, 1, deadline)
        except ProtocolError as error:
            raise PeerGoneError(str(error)) from None
        if answer.status != DONE:
            raise RefusedError("the peer does not offer this region any more")
        return TcpRemote(self, descriptor, stream, seal)

    def _serve(self, stream: SocketStream, seal: Seal) -> None:
        request, _ = read_request(stream, seal, 1, time.monotonic() + _FOREVER_S)
        region = self._find(request.region_id) if request.kind == OPEN else None
        status = DONE if region is not None else CLOSED
        stream.write(sign_answer(BulkAnswer(status, 1, 0), seal), time.monotonic() + _FOREVER_S)
        if region is not None:
            _Responder(stream, seal, region).run()


class _Responder:
    """Executor of one peer's requests on one region."""

    def __init__(self, stream: SocketStream, seal: Seal, region: LocalRegion) -> None:
        self._stream = stream
        self._seal = seal
        self._region = region
        self._bytes = reserve(SLICE_BYTES).view()

    def run(self) -> None:
        seq = 1
        while True:
            seq += 1
            deadline = time.monotonic() + _FOREVER_S
            request, offsets = read_request(self._stream, self._seal, seq, deadline)
            data = self._bytes[: request.run_bytes * request.num_runs]
            if request.kind == WRITE:
                read_bytes(self._stream, self._seal, data, deadline)
            status = self._do(request, offsets, data)
            parts = sign_answer(BulkAnswer(status, seq, self._region.epoch), self._seal)
            if request.kind == READ and status == DONE:
                parts += sign_bytes(data, self._seal)
            self._stream.write(parts, deadline)

    def _do(self, request: BulkRequest, offsets: Runs, data: npt.NDArray[np.uint8]) -> int:
        """Write ``data`` to the region, or read it from there; return the answer's status."""
        region = self._region
        if request.kind == OPEN:
            raise ProtocolError("a region is opened once on a connection")
        try:
            check_offsets(offsets, request.run_bytes, region.descriptor.num_bytes, "the region")
            with region.use(request.epoch):
                memory, staged = region.memory, Memory.of(data)
                if request.kind == WRITE:
                    scatter(memory, offsets, staged, request.run_bytes)
                else:
                    gather(staged, memory, offsets, request.run_bytes)
        except StaleEpochError:
            return STALE
        except RefusedError:
            return CLOSED if region.is_closed else OUTSIDE
        return DONE


class TcpRemote(PlannedRegion):
    """Region of a peer at the other end of a connection."""

    def __init__(
        self,
        transport: TcpTransport,
        descriptor: RegionDescriptor,
        stream: SocketStream,
        seal: Seal,
    ) -> None:
        self._transport = transport
        self._stream = stream
        self._seal = seal
        self._seq = 1
        self._broken = False
        self._staging = reserve(SLICE_BYTES).view()
        super().__init__(descriptor)

    def close(self) -> None:
        if self._transport.forget(self):
            super().close()
            self._stream.close()

    def _break_off(self) -> None:
        self._stream.abort()

    def _carry_out(self, ticket: PlanTicket) -> None:
        if self._broken:
            raise PeerGoneError("the connection was broken off: open the region again")
        under_way: deque[tuple[int, Plan]] = deque()
        failure: TransportError | None = None
        try:
            for part in ticket.plan.slices():
                try:
                    ticket.check()
                    if len(under_way) == _window(part):
                        self._take_answer(*under_way.popleft())
                except PeerGoneError:
                    raise
                except TransportError as error:
                    failure = error
                    break
                under_way.append((self._send(part), part))
            failure = self._take_rest(under_way, failure)
        except (PeerGoneError, ProtocolError) as error:
            self._broken = True
            ticket.check()
            raise PeerGoneError(str(error)) from None
        if failure is not None:
            raise failure

    def _take_rest(
        self, under_way: deque[tuple[int, Plan]], failure: TransportError | None
    ) -> TransportError | None:
        # Even after a failure, the answers to all requests sent must be read from the connection.
        while under_way:
            try:
                self._take_answer(*under_way.popleft())
            except PeerGoneError:
                raise
            except TransportError as error:
                failure = failure or error
        return failure

    def _send(self, part: Plan) -> int:
        self._seq += 1
        kind, offsets = WRITE if part.writes else READ, part.remote_offsets
        request = BulkRequest(kind, self._seq, part.epoch, part.num_bytes, offsets.size, _NO_ID)
        if part.writes:
            # Staged, so that the signed bytes are those sent, even if ``local`` changes meanwhile.
            data = self._staging[: part.local_offsets.size * part.num_bytes]
            gather(Memory.of(data), part.local, part.local_offsets, part.num_bytes)
        parts = sign_request(request, offsets, self._seal)
        if part.writes:
            parts += sign_bytes(data, self._seal)
        self._stream.write(parts, time.monotonic() + _FOREVER_S)
        return self._seq

    def _take_answer(self, seq: int, part: Plan) -> None:
        deadline = time.monotonic() + _FOREVER_S
        answer = read_answer(self._stream, self._seal, seq, deadline)
        if answer.status == STALE:
            raise StaleEpochError(f"the region is at epoch {answer.detail}, not {part.epoch}")
        if answer.status != DONE:
            raise RefusedError("the region is closed or smaller than its descriptor says")
        if not part.writes:
            data = self._staging[: part.local_offsets.size * part.num_bytes]
            read_bytes(self._stream, self._seal, data, deadline)
            scatter(part.local, part.local_offsets, Memory.of(data), part.num_bytes)


def _window(part: Plan) -> int:
    return _WINDOW if part.writes or part.remote_offsets.size <= _MAX_RUNS_AHEAD else 1


class BulkRequest(NamedTuple):
    """Request for a slice.

    Attributes:
        kind: Kind of the request: OPEN, WRITE or READ.
        seq: Number of the request, one more than that of the request before.
        epoch: Epoch of the transfer.
        run_bytes: Length of each run.
        num_runs: Number of runs, whose offsets follow.
        region_id: Id of the region for OPEN, else zeroes.
    """

    kind: int
    seq: int
    epoch: int
    run_bytes: int
    num_runs: int
    region_id: bytes


class BulkAnswer(NamedTuple):
    """Answer to a request; ``detail`` is the region's epoch."""

    status: int
    seq: int
    detail: int


def sign_bytes(data: npt.NDArray[np.uint8], seal: Seal) -> list[memoryview | bytes]:
    """Return the parts that follow a WRITE or the answer to a READ, as a separate frame."""
    return [data.data, seal.sign([data.data])]


def read_bytes(
    stream: SocketStream, seal: Seal, target: npt.NDArray[np.uint8], deadline: float
) -> None:
    """Fill ``target`` with the bytes of the peer's ``sign_bytes``.

    Raises:
        ProtocolError: The code is wrong; the content of ``target`` is invalid.
    """
    code = seal.next_received()
    for first in range(0, target.size, _CHECKED_BYTES):
        part = target[first : first + _CHECKED_BYTES].data
        stream.read_into(part, deadline)
        code.add(part)
    if not seal.accept(code, bytes(_read(stream, CODE_BYTES, deadline))):
        raise ProtocolError("bytes were changed on their way from the peer")


def sign_request(
    request: BulkRequest, offsets: npt.NDArray[np.int64], seal: Seal
) -> list[memoryview | bytes]:
    """Return the parts of a request without the bytes to write."""
    parts: list[memoryview | bytes] = [_REQUEST.pack(*request), offsets.astype("<i8").tobytes()]
    return [*parts, seal.sign(parts)]


def read_request(
    stream: SocketStream, seal: Seal, seq: int, deadline: float
) -> tuple[BulkRequest, npt.NDArray[np.int64]]:
    """Return the next request, whose offsets are not checked yet.

    Raises:
        ProtocolError: The bytes are not a request, or not the peer's next one.
    """
    head = _read(stream, _REQUEST.size, deadline)
    request = BulkRequest(*_REQUEST.unpack(head))
    # Before the code is verified, only the size of what is to be read is checked.
    if request.num_runs > MAX_RUNS or request.run_bytes * request.num_runs > SLICE_BYTES:
        raise ProtocolError("a slice is too large")
    encoded = _read(stream, 8 * request.num_runs, deadline)
    if not seal.verify([head, encoded], bytes(_read(stream, CODE_BYTES, deadline))):
        raise ProtocolError("a request has a wrong code")
    if request.seq != seq or request.kind > READ or request.epoch > MAX_EPOCH:
        raise ProtocolError("a request is out of order")
    return request, np.frombuffer(encoded, "<i8").astype(np.int64)


def sign_answer(answer: BulkAnswer, seal: Seal) -> list[memoryview | bytes]:
    """Return the parts of an answer without the bytes read."""
    head = _ANSWER.pack(*answer)
    return [head, seal.sign([head])]


def read_answer(stream: SocketStream, seal: Seal, seq: int, deadline: float) -> BulkAnswer:
    """Return the answer to request ``seq``.

    Raises:
        ProtocolError: The bytes are not the answer to this request.
    """
    head = _read(stream, _ANSWER.size, deadline)
    answer = BulkAnswer(*_ANSWER.unpack(head))
    if not seal.verify([head], bytes(_read(stream, CODE_BYTES, deadline))):
        raise ProtocolError("an answer has a wrong code")
    if answer.seq != seq:
        raise ProtocolError("an answer is out of order")
    return answer


def _read(stream: SocketStream, num_bytes: int, deadline: float) -> bytearray:
    target = bytearray(num_bytes)
    stream.read_into(memoryview(target), deadline)
    return target
