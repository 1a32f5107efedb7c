"""Frames of messages on a stream, and the checks on arrival.

A frame is a prefix (lengths of header and payload), a msgpack header, the bytes of the tensors in
order, and on TCP a message authentication code over all of these.
"""

from __future__ import annotations

import math
import struct
from typing import Annotated

import msgspec

from banaserve.base.errors import ProtocolError
from banaserve.transport.errors import RefusedError
from banaserve.transport.interface import MAX_DIMENSIONS, MAX_EPOCH, Bytes, Message, Tensor

MAX_HEADER_BYTES = 2**20
MAX_PAYLOAD_BYTES = 2**28
MAX_TENSORS = 256
PREFIX = struct.Struct("<IQ")

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
        kind: Kind of the frame: ONE_WAY, REQUEST, REPLY or REFUSAL.
        token: ``seq`` of the request that a REPLY or REFUSAL answers; otherwise 0.
        epoch: Epoch of the sender.
        body: Body of the ``Message``.
        tensors: Data type and shape of each tensor.
    """

    seq: _Serial
    kind: Annotated[int, msgspec.Meta(ge=ONE_WAY, le=REFUSAL)]
    token: _Serial
    epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
    body: bytes
    tensors: Annotated[tuple[tuple[str, _Shape], ...], msgspec.Meta(max_length=MAX_TENSORS)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FrameHeader)


def encode(message: Message, seq: int, kind: int, token: int) -> list[memoryview | bytes]:
    """Encode a message as the parts of a frame, ready to be sent.

    Raises:
        RefusedError: A peer would not accept the message.
    """
    described = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in message.tensors)
    header = _encoder.encode(FrameHeader(seq, kind, token, message.epoch, message.body, described))
    try:
        sizes = tensor_sizes(decode(header))
        payload_bytes = check_lengths(len(header), sum(sizes))
        payload = [_bytes_of(tensor, n) for tensor, n in zip(message.tensors, sizes, strict=True)]
    except ProtocolError as error:
        raise RefusedError(f"the message cannot be sent: {error}") from None
    return [PREFIX.pack(len(header), payload_bytes) + header, *payload]


def check_lengths(header_bytes: int, payload_bytes: int) -> int:
    """Check the lengths of a frame and return ``payload_bytes``.

    Raises:
        ProtocolError: A length is too large.
    """
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a header of {header_bytes} and {payload_bytes} bytes is too large")
    return payload_bytes


def decode(header: bytes | bytearray) -> FrameHeader:
    """Decode the header of a received frame.

    Raises:
        ProtocolError: The bytes are not a header.
    """
    try:
        return _decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message: {error}") from None


def tensor_sizes(header: FrameHeader) -> list[int]:
    """Return the size of each tensor in bytes.

    Raises:
        ProtocolError: A data type is unknown, or a tensor is too large.
    """
    sizes = []
    for dtype, shape in header.tensors:
        item_bytes = ITEM_BYTES.get(dtype)
        if item_bytes is None:
            raise ProtocolError(f"unknown data type {dtype[:64]!r}")
        num_bytes = math.prod(shape) * item_bytes
        if num_bytes > MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"a tensor of {num_bytes} bytes is too large")
        sizes.append(num_bytes)
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
