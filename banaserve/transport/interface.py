"""Transport interface: one-sided copies between two processes, and messages of one pair.

One side offers a region of its memory; its peer opens the region by its descriptor and copies
between its own memory and the region without calls in the offering side's code. Messages and
activations are sent over a ``StreamChannel``, one for each pair of processes.
"""

from __future__ import annotations

import secrets
import socket
import threading
from abc import ABC, abstractmethod

import msgspec
import numpy as np
import numpy.typing as npt

from banaserve.transport.errors import RefusedError
from banaserve.transport.regions.descriptor import RegionDescriptor, check_offer
from banaserve.transport.regions.offered_region import OfferedRegion, RegionStore
from banaserve.transport.regions.remote_region import RemoteRegion
from banaserve.transport.threaded_server import ConnectionPlaces, Service

MIN_SECRET_BYTES = 16
Bytes = npt.NDArray[np.uint8]
MAX_DIMENSIONS = 16
REGION_ID_BYTES = 16


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


class Transport(ABC):
    """Way to copy between processes. Thread-safe.

    It has tables of this process's regions, and a service, started by the first offer, that answers
    peers.
    """

    name: str

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._offered: dict[bytes, OfferedRegion] = {}
        self._opened: set[RemoteRegion] = set()
        self._service: Service | None = None
        self._places = ConnectionPlaces()
        self._address = ""

    def offer(self, num_bytes: int, epoch: int) -> OfferedRegion:
        """Reserve zeroed memory and offer it. Pages are allocated at their first write.

        Raises:
            RefusedError: The size or the epoch is out of range.
        """
        check_offer(num_bytes, epoch)
        with self._lock:
            if self._service is None:
                listener, self._address = self._listen()
                name = f"transport-{self.name}"
                self._service = Service(name, listener, self._serve, self._places)
            region_id = secrets.token_bytes(REGION_ID_BYTES)
            place = RegionDescriptor(self.name, region_id, num_bytes, epoch, self._address)
            store = self._reserve(num_bytes, epoch)
            region = self._offered[region_id] = OfferedRegion(place, store, self.forget_offered)
            return region

    def open(self, descriptor: RegionDescriptor, timeout_s: float) -> RemoteRegion:
        """Open a region by connecting to the offering side.

        Raises:
            PeerGoneError: There is no answer.
            TransferTimeoutError: The answer takes too long.
            RefusedError: The offering side does not know the region, or authentication failed.
        """
        if descriptor.transport != self.name:
            raise RefusedError(
                f"a region of transport {descriptor.transport!r} is not one of {self.name}"
            )
        remote = self._connect(descriptor, timeout_s)
        with self._lock:
            self._opened.add(remote)
        return remote

    def close(self) -> None:
        """Close every region that was offered or opened by this object."""
        with self._lock:
            service, self._service = self._service, None
            opened, offered = list(self._opened), list(self._offered.values())
        for remote in opened:
            remote.close()
        for region in offered:
            region.close()
        if service is not None:
            service.close()

    def forget_opened(self, remote: RemoteRegion) -> bool:
        """Remove an opened region from its table; return False if it was removed before."""
        with self._lock:
            known = remote in self._opened
            self._opened.discard(remote)
            return known

    def forget_offered(self, region: OfferedRegion) -> bool:
        """Remove an offered region from its table; return False if it was removed before."""
        with self._lock:
            return self._offered.pop(region.descriptor.region_id, None) is not None

    def _find(self, region_id: bytes) -> OfferedRegion | None:
        with self._lock:
            return self._offered.get(region_id)

    @abstractmethod
    def _listen(self) -> tuple[socket.socket, str]:
        """Return a listening socket and its address for peers."""

    @abstractmethod
    def _reserve(self, num_bytes: int, epoch: int) -> RegionStore:
        """Return zeroed memory for a new region."""

    @abstractmethod
    def _connect(self, descriptor: RegionDescriptor, timeout_s: float) -> RemoteRegion:
        """Open a peer's region, see ``Transport.open``."""

    @abstractmethod
    def _serve(self, sock: socket.socket) -> None:
        """Serve one peer until it closes; any exception ends the connection."""
