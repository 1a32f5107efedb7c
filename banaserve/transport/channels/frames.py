"""Frames of messages on a stream, and the checks on arrival.

A frame is a frame of ``base/net/framing.py`` whose message is the header, the bytes of the tensors
in order, and on TCP a message authentication code over all of these.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from banaserve.base.errors import ProtocolError
from banaserve.base.net.framing import LENGTH_BYTES, Framing
from banaserve.transport.errors import RefusedError
from banaserve.transport.interface import MAX_DIMENSIONS, Bytes, Message, Tensor
from banaserve.transport.regions.descriptor import MAX_EPOCH

MAX_HEADER_BYTES = 2**20
MAX_PAYLOAD_BYTES = 2**28
MAX_TENSORS = 256

ONE_WAY, REQUEST, REPLY, REFUSAL = range(4)

ELSEWHERE = "elsewhere"
"""Type of a tensor whose bytes say where the values are; what they say is the sender's protocol."""
ITEM_BYTES = {
    ELSEWHERE: 1,
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_PAYLOAD_BYTES)]
_Shape = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
_Serial = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class FrameHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Header in front of the tensors.

    Attributes:
        seq: Number of the frame in this direction, one more than that of the frame before it.
        token: ``seq`` of the request that a REPLY or REFUSAL answers; otherwise 0.
        body: Body of the ``Message``.
        tensors: Data type and shape of each tensor.
    """

    seq: _Serial
    kind: Annotated[int, msgspec.Meta(ge=ONE_WAY, le=REFUSAL)]
    token: _Serial
    epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
    body: bytes
    tensors: Annotated[tuple[tuple[str, _Shape], ...], msgspec.Meta(max_length=MAX_TENSORS)]


HEADERS: Framing[FrameHeader] = Framing(FrameHeader, MAX_HEADER_BYTES)


def encode(message: Message, seq: int, kind: int, token: int) -> list[memoryview | bytes]:
    """Encode a message as the parts of a frame; raise RefusedError if no peer would accept it."""
    described = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in message.tensors)
    header = FrameHeader(seq, kind, token, message.epoch, message.body, described)
    try:
        head = HEADERS.encode(header)
        sizes = tensor_sizes(HEADERS.decode(memoryview(head)[LENGTH_BYTES:]))
        payload = [_bytes_of(tensor, n) for tensor, n in zip(message.tensors, sizes, strict=True)]
    except ProtocolError as error:
        raise RefusedError(f"the message cannot be sent: {error}") from None
    return [head, *payload]


def tensor_sizes(header: FrameHeader) -> list[int]:
    """Return the size of each tensor in bytes.

    Raises:
        ProtocolError: A data type is unknown, or the tensors are too large.
    """
    sizes = []
    for dtype, shape in header.tensors:
        item_bytes = ITEM_BYTES.get(dtype)
        if item_bytes is None:
            raise ProtocolError(f"unknown data type {dtype[:64]!r}")
        sizes.append(math.prod(shape) * item_bytes)
    if sum(sizes) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"tensors of {sum(sizes)} bytes are too large")
    return sizes


def view_of(data: Bytes) -> memoryview:
    """Return the bytes of an array; also of an empty one, whose own memoryview cannot be cast."""
    return data.data.cast("B") if data.nbytes else memoryview(b"")


def _bytes_of(tensor: Tensor, num_bytes: int) -> memoryview:
    data = tensor.data
    if data.nbytes != num_bytes or not data.flags.c_contiguous:
        raise ProtocolError(
            f"a tensor {tensor.dtype} {tensor.shape} has {num_bytes} contiguous bytes, "
            f"not {data.nbytes}"
        )
    return view_of(data)
