"""Transport interface: one-sided copies between two processes, and messages of one pair.

One side offers a region of its memory; its peer opens the region by its descriptor and copies
between its own memory and the region without calls in the offering side's code. Messages and
activations are sent over a ``Channel``, one for each pair of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from banaserve.transport.memory import Memory

MIN_SECRET_BYTES = 16
Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64] | Sequence[int]
MAX_REGION_BYTES = 2**48
MAX_EPOCH = 2**62
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


class RegionDescriptor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Description by which a peer opens a region; contains no secret.

    Attributes:
        transport: Name of the transport that offers the region.
        region_id: Id of the offer, 16 random bytes; a new offer of the same memory has another id.
        num_bytes: Size of the region.
        epoch: Epoch at the time of the offer.
        address: Address at which the offering side answers, in the transport's own form.
        extra: Further data that the transport needs.
    """

    transport: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    region_id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_REGION_BYTES)]
    epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    extra: Annotated[bytes, msgspec.Meta(max_length=64 * 1024)] = b""


class Ticket(Protocol):
    """Ticket of a submitted transfer."""

    def poll(self) -> bool:
        """Return whether the transfer has ended or failed; never waits and never raises."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until all bytes are copied.

        Raises:
            TransferTimeoutError: The transfer has not ended yet; it continues.
            PeerGoneError: The peer has died or broken the connection.
            RefusedError: The region refuses the transfer; StaleEpochError if the epoch is the
                reason.
            TransferCancelledError: The transfer was cancelled.
        """
        ...

    def cancel(self) -> bool:
        """Cancel; return when local memory is no longer touched, within about a second.

        Cancelling in the middle of a run may cost the connection: then the next submit raises
        PeerGoneError and the region has to be opened again.

        Returns:
            False if the transfer had ended before.
        """
        ...


class OfferedRegion(Protocol):
    """Memory that a peer may copy to and from, on the owner's side.

    Attributes:
        memory: Bytes of the region in this process.
        descriptor: Descriptor by which the peer opens the region.
        epoch: Epoch of the region; transfers of any other epoch are refused.
    """

    @property
    def memory(self) -> Memory: ...

    @property
    def descriptor(self) -> RegionDescriptor: ...

    @property
    def epoch(self) -> int: ...

    def advance(self, epoch: int, timeout_s: float) -> None:
        """Accept only ``epoch`` from now on; on return no transfer of another epoch is under way.

        Raises:
            RefusedError: ``epoch`` is smaller than the current one.
            TransferTimeoutError: A peer hangs in the middle of a transfer. The region refuses new
                transfers of another epoch, but that transfer is not known to have ended.
        """
        ...

    def release(self, first_byte: int, num_bytes: int) -> int:
        """Give the whole pages of a range back to the system; they read as zero until written.

        Returns:
            Maximum number of bytes given back: whole pages of the range.

        Raises:
            RefusedError: The range is outside the region, or the transport does not own the
                memory.
        """
        ...

    def close(self) -> None:
        """Refuse every transfer and free the memory; ``memory`` must not be used afterwards."""
        ...


class RemoteRegion(Protocol):
    """Region of a peer. Transfers end in the order of their submission; any thread may submit.

    Offsets are in bytes; run ``i`` of a transfer copies ``num_bytes`` between ``local_offsets[i]``
    of ``local`` and ``remote_offsets[i]`` of the region. If runs of one submission overlap in
    their target, the bytes of either run remain there.
    """

    @property
    def descriptor(self) -> RegionDescriptor: ...

    def submit_write(
        self,
        local: Memory,
        local_offsets: Offsets,
        remote_offsets: Offsets,
        num_bytes: int,
        epoch: int,
    ) -> Ticket:
        """Begin to copy to the peer. ``local`` must not change until the ticket has ended.

        Raises:
            RefusedError: A run is out of bounds on either side, or the numbers of offsets differ.
            PeerGoneError: The peer is already known to be gone.
        """
        ...

    def submit_read(
        self,
        local: Memory,
        local_offsets: Offsets,
        remote_offsets: Offsets,
        num_bytes: int,
        epoch: int,
    ) -> Ticket:
        """Begin to copy from the peer into ``local``, which must be writable.

        Raises:
            RefusedError: ``local`` is read-only, or see ``submit_write``.
            PeerGoneError: The peer is already known to be gone.
        """
        ...

    def warm(self, first_byte: int, num_bytes: int) -> None:
        """Allocate the pages of a range if memory is shared, to avoid page faults in copies.

        Raises:
            RefusedError: The range is outside the region.
        """
        ...

    def close(self) -> None:
        """Cancel the transfers under way and close the region."""
        ...


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
    """Message of a channel.

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


class Channel(Protocol):
    """Channel for ordered messages between two processes. One thread receives or calls at a time.

    A message whose epoch is below ``min_epoch`` is not delivered: a request of this kind is
    answered with StaleEpochError, others are counted in ``num_refused``.
    """

    min_epoch: int

    @property
    def num_refused(self) -> int:
        """Number of messages that arrived but were not delivered: duplicate, stale, late reply."""
        ...

    def fileno(self) -> int:
        """Return a file descriptor, readable when something has arrived or the peer is gone."""
        ...

    def has_pending(self) -> bool:
        """Return whether arrived bytes or messages were already read from ``fileno``."""
        ...

    def send(self, message: Message, timeout_s: float) -> None:
        """Send a one-way message.

        Raises:
            RefusedError: The message is too large or not well-formed; nothing was sent.
            TransferTimeoutError: The peer does not read. The channel is closed.
            PeerGoneError: The peer has died or closed the connection.
        """
        ...

    def call(self, message: Message, timeout_s: float) -> Message:
        """Send a request and wait for its reply. Messages that arrive before it are kept.

        Raises:
            RefusedError: The message is refused, see ``send``; StaleEpochError if the peer's epoch
                is higher.
            TransferTimeoutError: No reply arrived in time. The channel stays usable; the late reply
                is dropped and counted.
            PeerGoneError: The peer has died or closed the connection.
        """
        ...

    def receive(self, timeout_s: float) -> Message:
        """Return the next request or one-way message.

        Raises:
            TransferTimeoutError: Nothing arrived in time; the channel stays usable.
            PeerGoneError: The peer has died, closed the connection, or broken the protocol.
        """
        ...

    def reply(self, request: Message, answer: Message, timeout_s: float) -> None:
        """Answer a request that was received.

        Raises:
            RefusedError: ``request`` is not a request, or ``answer`` is too large.
            TransferTimeoutError: The peer does not read. The channel is closed.
            PeerGoneError: The peer has died or closed the connection.
        """
        ...

    def close(self) -> None:
        """Close the connection; the peer notices at once."""
        ...
