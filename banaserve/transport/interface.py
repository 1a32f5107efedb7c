"""Transport interface: one-sided copies between two processes, and messages of one pair.

One side offers a region of its memory; its peer opens the region by its descriptor and copies
between its own memory and the region without calls in the offering side's code. Messages and
activations are sent over a ``StreamChannel``, one for each pair of processes.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from banaserve.transport.regions.descriptor import RegionDescriptor
from banaserve.transport.regions.offered_region import OfferedRegion
from banaserve.transport.regions.remote_region import RemoteRegion

MIN_SECRET_BYTES = 16
Bytes = npt.NDArray[np.uint8]
MAX_DIMENSIONS = 16


class TransportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a process for all transports.

    Attributes:
        folder: Private folder of the run, for Unix sockets.
        host: Address to listen on, if a transport uses TCP.
        secret: Secret of the run, at least 16 bytes, the same on both sides.
        device: Index of this process's GPU, for transports of GPU memory.
        in_gpu_memory: True to offer memory of that GPU, for a transport that can offer either.
    """

    folder: str
    secret: bytes
    host: str = "127.0.0.1"
    device: int = 0
    in_gpu_memory: bool = False

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET_BYTES:
            raise ValueError(f"a secret has at least {MIN_SECRET_BYTES} bytes")

    def __repr__(self) -> str:
        return f"TransportOptions(folder={self.folder!r}, host={self.host!r})"


class Transport(Protocol):
    """Way to copy between processes. Thread-safe."""

    @property
    def name(self) -> str: ...

    def offer(self, num_bytes: int, epoch: int) -> OfferedRegion:
        """Reserve zeroed memory and offer it. Pages are allocated at their first write.

        Raises:
            RefusedError: The size or the epoch is out of range.
        """
        ...

    def open(self, descriptor: RegionDescriptor, timeout_s: float) -> RemoteRegion:
        """Open a region by connecting to the offering side.

        Raises:
            PeerGoneError: There is no answer.
            TransferTimeoutError: The answer takes too long.
            RefusedError: The offering side does not know the region, or authentication failed.
        """
        ...

    def close(self) -> None:
        """Close every region that was offered or opened by this object."""
        ...


class Tensor(msgspec.Struct, frozen=True):
    """Bytes of a contiguous tensor.

    Attributes:
        dtype: Name of the data type without a library's prefix: ``float32``, ``bfloat16``,
            ``int64``.
        shape: Sizes of the dimensions.
        data: Bytes, ``[num_bytes]`` uint8, C order. The data of a received tensor is writable and
            belongs to the receiver.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


class Message(msgspec.Struct, frozen=True):
    """Message of a channel, see ``channels.channel.StreamChannel``.

    Attributes:
        body: Body, msgspec-encoded by the sender's protocol.
        tensors: Tensors sent with the body.
        epoch: Epoch of the sender.
        token: Number of a received request, which ``reply`` needs; 0 for other messages.
    """

    body: bytes
    tensors: tuple[Tensor, ...] = ()
    epoch: int = 0
    token: int = 0
