"""Memory of a GPU through which a host and its guest pass the large tensors of their messages.

The guest offers one region: requests are written to its first half, answers to its second half. The
host alone decides which bytes are in use, and gives an answer its room with the request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import torch

from banaserve.base.errors import ProtocolError
from banaserve.migration.rpc.tensors import (
    TensorBundle,
    TensorOnGpu,
    bytes_of,
    dtype_named,
    memory_of,
)
from banaserve.transport.channels.frames import ELSEWHERE
from banaserve.transport.interface import MAX_DIMENSIONS, Tensor, Transport
from banaserve.transport.regions.offered_region import OfferedRegion
from banaserve.transport.regions.remote_region import RemoteRegion

LANE_BYTES = 256 * 2**20
"""Size of the region: each half holds two tensors of 8192 tokens of 4096 values in bfloat16."""
MIN_BYTES = 64 * 2**10
"""Size below which a tensor goes through host memory: a copy beside it costs several waits."""
_EPOCH = 0
_COPY_TIMEOUT_S = 5.0
_ALIGN_BYTES = 256
_ANSWERS_PER_REQUEST = 2
"""Room for an answer, in bytes for each byte of a request: attention answers in float32."""
_NO_BYTES = np.empty(0, np.uint8)

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class _Place(msgspec.Struct, frozen=True, array_like=True, tag="at"):
    """Place of a tensor in the region."""

    offset: _Size
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]


class _Room(msgspec.Struct, frozen=True, array_like=True, tag="room"):
    """Part of the region for the answer."""

    offset: _Size
    num_bytes: _Size


_decoder = msgspec.msgpack.Decoder(_Place | _Room)


class LaneHalf:
    """Pieces of ``num_bytes`` bytes that are given back from either end of their order."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, num_bytes: int) -> int | None:
        """Return the offset of a free piece, a multiple of 256; None if none is large enough."""
        size = -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        oldest, newest_end = (self._taken[0][0], sum(self._taken[-1])) if self._taken else (0, 0)
        if not self._taken or newest_end > oldest:
            fits = next(
                (start for start, end in ((newest_end, self._num_bytes), (0, oldest))
                 if start + size <= end),
                None,
            )  # fmt: skip
        else:
            fits = newest_end if newest_end + size <= oldest else None
        if fits is not None:
            self._taken.append((fits, size))
        return fits

    def give_back(self, num_pieces: int = 1, *, newest: bool = False) -> None:
        """Give back the oldest pieces, or the newest."""
        for _ in range(num_pieces):
            self._taken.pop() if newest else self._taken.popleft()


class HostLane:
    """The host's end.

    Requests are put together, sent and answered in one order, by one thread at a time.

    Attributes:
        num_passed: Number of tensors that did not go through host memory, in either direction.
    """

    def __init__(self, region: RemoteRegion, device: torch.device) -> None:
        self.num_passed = 0
        self._region = region
        self._device = device
        self._half_bytes = region.descriptor.num_bytes // 2
        self._requests, self._answers = LaneHalf(self._half_bytes), LaneHalf(self._half_bytes)
        self._building: list[int] = []
        self._sent: deque[tuple[int, _Room | None]] = deque()

    def begin(self) -> None:
        """Begin the next request; what was written for one that was not sent is free again."""
        self._requests.give_back(len(self._building), newest=True)
        self._building = []

    def write(self, tensor: torch.Tensor) -> Tensor | None:
        """Write a tensor of the next request, see ``tensors.Pass``.

        Raises:
            TransportError: The guest is gone.
        """
        if tensor.device.type != self._device.type or tensor.nbytes < MIN_BYTES:
            return None
        if (offset := self._requests.take(tensor.nbytes)) is None:
            return None
        self._building.append(tensor.nbytes)
        whole = tensor.detach().contiguous()
        _wait(self._device)  # until the values are there
        memory = memory_of(whole)
        ticket = self._region.submit_write(memory, [0], [offset], memory.num_bytes, _EPOCH)
        ticket.wait(_COPY_TIMEOUT_S)
        self.num_passed += 1
        return _told(_Place(offset, _name(whole.dtype), tuple(whole.shape)))

    def sent(self) -> list[Tensor]:
        """Note that the request is being sent; return what to send after its tensors."""
        pieces, self._building = self._building, []
        num_bytes = sum(pieces) * _ANSWERS_PER_REQUEST
        room: _Room | None = None
        if pieces and (offset := self._answers.take(num_bytes)) is not None:
            room = _Room(self._half_bytes + offset, num_bytes)
        self._sent.append((len(pieces), room))
        return [] if room is None else [_told(room)]

    def received(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of the answer to the earliest request that has none yet.

        Raises:
            ProtocolError: A tensor is where none can be.
            TransportError: The region is out of reach.
        """
        num_pieces, room = self._sent.popleft()
        found = [self._read(tensor, room) for tensor in tensors]
        self._requests.give_back(num_pieces)
        if room is not None:
            self._answers.give_back()
        return found

    def _read(self, tensor: Tensor, room: _Room | None) -> Tensor:
        if tensor.dtype != ELSEWHERE:
            return tensor
        place = _place(tensor)
        if room is None:
            raise ProtocolError("an answer lies in memory that it was not given")
        num_bytes = _check(place, room.offset, room.offset + room.num_bytes)
        values = torch.empty(place.shape, dtype=dtype_named(place.dtype), device=self._device)
        _wait(self._device)  # torch may have taken this memory from work that is still queued
        ticket = self._region.submit_read(memory_of(values), [0], [place.offset], num_bytes, _EPOCH)
        ticket.wait(_COPY_TIMEOUT_S)
        self.num_passed += 1
        return TensorOnGpu(place.dtype, place.shape, _NO_BYTES, values)

    def close(self) -> None:
        self._region.close()


class GuestLane:
    """The guest's end, which offers the region.

    Raises:
        TransportError: There is no memory, or the transport cannot offer it.
    """

    def __init__(
        self, transport: Transport, device: torch.device, num_bytes: int = LANE_BYTES
    ) -> None:
        self.region: OfferedRegion = transport.offer(num_bytes, _EPOCH)
        self._device = device
        self._bytes = bytes_of(self.region.memory, device)
        self._next, self._end = 0, 0

    def received(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of a request; the answer is to be put together next.

        Raises:
            ProtocolError: A tensor is where none can be.
        """
        self._next = self._end = 0
        found = list(tensors)
        if found and found[-1].dtype == ELSEWHERE and isinstance(said := _said(found[-1]), _Room):
            found.pop()
            half = len(self._bytes) // 2
            if said.offset < half or said.offset + said.num_bytes > len(self._bytes):
                raise ProtocolError("an answer was given room outside of the region")
            self._next, self._end = said.offset, said.offset + said.num_bytes
        return [self._read(tensor) for tensor in found]

    def bundle(self) -> TensorBundle:
        """Return the bundle of the answer to the request that was received last."""
        return TensorBundle(self._write)

    def _read(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != ELSEWHERE:
            return tensor
        place = _place(tensor)
        _check(place, 0, len(self._bytes) // 2)
        # A copy: layers write into their arguments, and a step's description outlives a request.
        values = self._view(place).clone()
        return TensorOnGpu(place.dtype, place.shape, _NO_BYTES, values)

    def _write(self, tensor: torch.Tensor) -> Tensor | None:
        if tensor.device.type != self._device.type or tensor.nbytes < MIN_BYTES:
            return None
        offset = -(-self._next // _ALIGN_BYTES) * _ALIGN_BYTES
        if offset + tensor.nbytes > self._end:
            return None
        self._next = offset + tensor.nbytes
        place = _Place(offset, _name(tensor.dtype), tuple(tensor.shape))
        self._view(place).copy_(tensor.detach())
        _wait(self._device)  # the host reads as soon as it has the answer
        return _told(place)

    def _view(self, place: _Place) -> torch.Tensor:
        dtype = dtype_named(place.dtype)
        num_bytes = math.prod(place.shape) * dtype.itemsize
        part = self._bytes[place.offset : place.offset + num_bytes]
        return part.view(dtype).view(place.shape)

    def close(self) -> None:
        self.region.close()


def _wait(device: torch.device) -> None:
    """Wait for the work that the current stream has queued."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _told(said: _Place | _Room) -> Tensor:
    data = np.frombuffer(msgspec.msgpack.encode(said), np.uint8)
    return Tensor(ELSEWHERE, (data.size,), data)


def _said(tensor: Tensor) -> _Place | _Room:
    try:
        return _decoder.decode(tensor.data.tobytes())
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"that tells the place of no tensor: {error}") from None


def _place(tensor: Tensor) -> _Place:
    said = _said(tensor)
    if not isinstance(said, _Place):
        raise ProtocolError("room for an answer is told where a tensor belongs")
    return said


def _check(place: _Place, first_byte: int, end_byte: int) -> int:
    """Return the number of bytes of a tensor that is within a part of the region."""
    num_bytes = math.prod(place.shape) * dtype_named(place.dtype).itemsize
    if place.offset % _ALIGN_BYTES or not first_byte <= place.offset <= end_byte - num_bytes:
        raise ProtocolError("a tensor lies outside of its part of the region")
    return num_bytes
