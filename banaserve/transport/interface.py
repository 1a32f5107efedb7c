"""Transport interface: one-sided copies between two processes, and messages of one pair.

The side that has memory to give offers a region; its peer opens the region's descriptor and copies
between its own memory and the region without the offering side's code taking part. Messages and
activations go over a ``Channel``, one for each pair of processes.
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
        host: Address to listen on, where a transport uses TCP.
        secret: Of the run, at least 16 bytes, the same on both sides.
    """

    folder: str
    secret: bytes
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET_BYTES:
            raise ValueError(f"a secret has at least {MIN_SECRET_BYTES} bytes")

    def __repr__(self) -> str:
        return f"TransportOptions(folder={self.folder!r}, host={self.host!r})"


class RegionDescriptor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Description by which a peer opens a region; holds no secret.

    Attributes:
        transport: Name of the transport that offers it.
        region_id: 16 random bytes: another offer of the same memory has another one.
        num_bytes: Of the region.
        epoch: At the time of the offer.
        address: Where the offering side answers, in the transport's own form.
        extra: What else the transport needs.
    """

    transport: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    region_id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_REGION_BYTES)]
    epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    extra: Annotated[bytes, msgspec.Meta(max_length=64 * 1024)] = b""


class Ticket(Protocol):
    """One submitted transfer."""

    def poll(self) -> bool:
        """Whether it has ended, well or badly; never waits and never raises."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when all bytes lie where they belong.

        Raises:
            TransferTimeoutError: Not ended yet; it goes on.
            PeerGoneError: The peer has died or broken the connection.
            RefusedError: The region refuses it; StaleEpochError where the epoch was the reason.
            TransferCancelledError: It was cancelled.
        """
        ...

    def cancel(self) -> bool:
        """Give up; returns when local memory is touched no more, within about a second.

        Cancelling in the middle of a run may cost the connection: then the next submit raises
        PeerGoneError and the region has to be opened again.

        Returns:
            False where it had ended before.
        """
        ...


class OfferedRegion(Protocol):
    """Memory that a peer may copy to and from, seen from its owner.

    Attributes:
        memory: The region's bytes in this process.
        descriptor: For the peer.
        epoch: The only one under which transfers are accepted.
    """

    @property
    def memory(self) -> Memory: ...

    @property
    def descriptor(self) -> RegionDescriptor: ...

    @property
    def epoch(self) -> int: ...

    def advance(self, epoch: int, timeout_s: float) -> None:
        """Accept only ``epoch`` from here on. After the return no transfer of another is under way.

        Raises:
            RefusedError: ``epoch`` is smaller than the present one.
            TransferTimeoutError: A peer stands still in the middle of a transfer. The region
                refuses whatever that peer begins, but that transfer is not known to have ended.
        """
        ...

    def release(self, first_byte: int, num_bytes: int) -> int:
        """Give the whole pages of a range back to the system; they read as zero until written.

        Returns:
            Bytes given back at most: whole pages of the range.

        Raises:
            RefusedError: The range lies outside, or the memory is not the transport's own.
        """
        ...

    def close(self) -> None:
        """Refuse every transfer and let go of the memory; ``memory`` must not be used after it."""
        ...


class RemoteRegion(Protocol):
    """A peer's region. Transfers end in the order of their submission; any thread may submit.

    Offsets are in bytes; transfer ``i`` copies ``num_bytes`` between ``local_offsets[i]`` of
    ``local`` and ``remote_offsets[i]`` of the region. Runs of one submission that overlap in their
    target leave either's bytes.
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
            RefusedError: Out of bounds on either side, or offsets of different lengths.
            PeerGoneError: Known without asking.
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
            RefusedError: As for a write.
            PeerGoneError: Known without asking.
        """
        ...

    def warm(self, first_byte: int, num_bytes: int) -> None:
        """Spare copies into a range their page faults; takes its pages where memory is shared.

        Raises:
            RefusedError: The range lies outside.
        """
        ...

    def close(self) -> None:
        """Cancel what is under way and let go of the region."""
        ...


class Transport(Protocol):
    """One way to copy between processes. Thread-safe."""

    @property
    def name(self) -> str: ...

    def offer(self, num_bytes: int, epoch: int) -> OfferedRegion:
        """Reserve zeroed memory and offer it. Pages are taken when they are first written.

        Raises:
            RefusedError: The size or the epoch is not possible.
        """
        ...

    def open(self, descriptor: RegionDescriptor, timeout_s: float) -> RemoteRegion:
        """Connect to the offering side.

        Raises:
            PeerGoneError: There is no answer.
            TransferTimeoutError: The answer takes too long.
            RefusedError: It does not know the region, or this process is not who it should be.
        """
        ...

    def close(self) -> None:
        """Close every region that was offered or opened here."""
        ...


class Tensor(msgspec.Struct, frozen=True):
    """The bytes of one contiguous tensor.

    Attributes:
        dtype: Its name without a library's prefix: ``float32``, ``bfloat16``, ``int64``.
        shape: Sizes of its dimensions.
        data: ``[num_bytes]`` uint8, C order. What was received is writable and the receiver's own.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


class Message(msgspec.Struct, frozen=True):
    """One message.

    Attributes:
        body: msgspec-encoded by the sender's protocol.
        tensors: What travels beside it.
        epoch: The sender's.
        token: What ``reply`` needs of a request that was received; 0 for one-way messages.
    """

    body: bytes
    tensors: tuple[Tensor, ...] = ()
    epoch: int = 0
    token: int = 0


class Channel(Protocol):
    """Messages between two processes, in order. One thread receives or calls at a time.

    A message whose epoch is below ``min_epoch`` is not delivered: a request of this kind is
    answered with StaleEpochError, others are counted in ``num_refused``.
    """

    min_epoch: int

    @property
    def num_refused(self) -> int:
        """Messages that arrived and were not delivered: duplicates, stale, late replies."""
        ...

    def fileno(self) -> int:
        """Readable when something has arrived or the peer is gone."""
        ...

    def has_pending(self) -> bool:
        """Whether something that has arrived was read from ``fileno`` already."""
        ...

    def send(self, message: Message, timeout_s: float) -> None:
        """Send one way.

        Raises:
            RefusedError: The message is too large or not well-formed; nothing was sent.
            TransferTimeoutError: The peer does not read. The channel is closed.
            PeerGoneError: The peer has died or closed.
        """
        ...

    def call(self, message: Message, timeout_s: float) -> Message:
        """Send a request and wait for its reply. One-way messages that come first are kept.

        Raises:
            RefusedError: As for ``send``; StaleEpochError where the peer's epoch is higher.
            TransferTimeoutError: No reply in time. The channel stays usable; the late reply is
                dropped and counted.
            PeerGoneError: The peer has died or closed.
        """
        ...

    def receive(self, timeout_s: float) -> Message:
        """The next request or one-way message.

        Raises:
            TransferTimeoutError: Nothing in time; the channel stays usable.
            PeerGoneError: The peer has died or closed, or sent what breaks the protocol.
        """
        ...

    def reply(self, request: Message, answer: Message, timeout_s: float) -> None:
        """Answer a request that was received.

        Raises:
            RefusedError: ``request`` is none, or ``answer`` is too large.
            TransferTimeoutError: The peer does not read. The channel is closed.
            PeerGoneError: The peer has died or closed.
        """
        ...

    def close(self) -> None:
        """Close the connection; the peer notices at once."""
        ...
