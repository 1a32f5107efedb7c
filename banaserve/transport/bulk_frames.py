"""How slices of a transfer lie on the TCP transport's connection.

Each request and each answer is a fixed head with a code over it; the head of one that is followed
by bytes holds their checksum. So nobody can forge where bytes go, and damaged bytes are noticed
before they reach a region.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from banaserve.errors import ProtocolError
from banaserve.transport.interface import MAX_EPOCH
from banaserve.transport.memory import SLICE_BYTES
from banaserve.transport.seal import CODE_BYTES, Seal
from banaserve.transport.stream import ByteStream

OPEN, WRITE, READ = range(3)
DONE, OUTSIDE, STALE, CLOSED, DAMAGED = range(5)
MAX_RUNS = SLICE_BYTES
_REQUEST = struct.Struct("<BQQQIQ16s")
_ANSWER = struct.Struct("<BQQQ")


class BulkRequest(NamedTuple):
    """One slice.

    Attributes:
        kind: OPEN, WRITE or READ.
        seq: One more than of the request before.
        epoch: Of the transfer.
        run_bytes: Of each run.
        num_runs: How many offsets follow.
        checksum: Of the bytes that follow a WRITE.
        region_id: For OPEN.
    """

    kind: int
    seq: int
    epoch: int
    run_bytes: int
    num_runs: int
    checksum: int
    region_id: bytes


class BulkAnswer(NamedTuple):
    """``detail`` is the region's epoch; ``checksum`` covers the bytes that follow a READ."""

    status: int
    seq: int
    detail: int
    checksum: int


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """XXH3-64."""
    value: int = xxhash.xxh3_64_intdigest(data.data)
    return value


def sign_request(
    request: BulkRequest, offsets: npt.NDArray[np.int64], seal: Seal
) -> list[memoryview | bytes]:
    """The parts of a request without its bytes."""
    parts: list[memoryview | bytes] = [_REQUEST.pack(*request), offsets.astype("<i8").tobytes()]
    return [*parts, seal.sign(parts)]


def read_request(
    stream: ByteStream, seal: Seal, seq: int, deadline: float
) -> tuple[BulkRequest, npt.NDArray[np.int64]]:
    """The next request, whose offsets are not checked yet.

    Raises:
        ProtocolError: It is none, or not the peer's next one.
    """
    head = _read(stream, _REQUEST.size, deadline)
    request = BulkRequest(*_REQUEST.unpack(head))
    # Before the code is checked, only bounds on what is read.
    if request.num_runs > MAX_RUNS or request.run_bytes * request.num_runs > SLICE_BYTES:
        raise ProtocolError("a slice is too large")
    encoded = _read(stream, 8 * request.num_runs, deadline)
    if not seal.verify([head, encoded], bytes(_read(stream, CODE_BYTES, deadline))):
        raise ProtocolError("a request has a wrong code")
    if request.seq != seq or request.kind > READ or request.epoch > MAX_EPOCH:
        raise ProtocolError("a request is out of order")
    return request, np.frombuffer(encoded, "<i8").astype(np.int64)


def sign_answer(answer: BulkAnswer, seal: Seal) -> list[memoryview | bytes]:
    """The parts of an answer without its bytes."""
    head = _ANSWER.pack(*answer)
    return [head, seal.sign([head])]


def read_answer(stream: ByteStream, seal: Seal, seq: int, deadline: float) -> BulkAnswer:
    """The answer to request ``seq``.

    Raises:
        ProtocolError: What came is none.
    """
    head = _read(stream, _ANSWER.size, deadline)
    answer = BulkAnswer(*_ANSWER.unpack(head))
    if not seal.verify([head], bytes(_read(stream, CODE_BYTES, deadline))):
        raise ProtocolError("an answer has a wrong code")
    if answer.seq != seq:
        raise ProtocolError("an answer is out of order")
    return answer


def _read(stream: ByteStream, num_bytes: int, deadline: float) -> bytearray:
    target = bytearray(num_bytes)
    stream.read_into(memoryview(target), deadline)
    return target
