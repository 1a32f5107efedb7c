"""Messages between a host and its guest. Tensors are sent beside a message, not in it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import operator
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from banaserve.base.errors import ProtocolError
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.transport.backends.cuda_ipc import CudaIpcTransport
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.channels.connect import accept_tcp, connect, over_unix
from banaserve.transport.errors import PeerGoneError, RefusedError, TransferTimeoutError
from banaserve.transport.interface import Transport, TransportOptions
from banaserve.transport.regions.descriptor import RegionDescriptor
from banaserve.transport.registry import NIXL, create

Unit = TypeVar("Unit")
_TCP = "tcp:"


class GuestAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address and secrets of a guest, made by the coordinator for the guest and its host.

    Attributes:
        guest_id: Id of the guest; there is one guest for each host and target, or for each move.
        channel: Address of the guest's channel: path of a Unix socket, or ``tcp:HOST:PORT``.
        token: Secret that the host shows to the guest.
        secret: Secret of the transports of the run, in hex, at least 32 digits.
        target: Id of the instance beside which the guest runs, on the same devices.
        is_elsewhere: True if the host runs on another machine than the guest.
        rank: Rank of the host's worker that this process serves: a guest has a process for each.
        rendezvous: Path by which these processes find each other; empty if there is only one.
    """

    guest_id: str
    channel: str
    token: str
    transport: str
    folder: str
    secret: str
    listen_host: str = "127.0.0.1"
    target: str = ""
    is_elsewhere: bool = False
    rank: int = 0
    rendezvous: str = ""

    def make_transport(self) -> Transport:
        """Return the transport, for either side.

        Raises:
            UserError: There is no such transport here.
        """
        return create(self.transport, self._options)

    def make_gpu_transport(self) -> Transport:
        """Return the transport of memory of this process's GPU, for either side.

        Raises:
            TransportError: There is none between these two machines, or this process has no GPU
                that it can share.
            UserError: A package is missing.
        """
        options = self._options
        if not self.is_elsewhere:
            return CudaIpcTransport(options)
        if self.transport != NIXL:
            raise RefusedError(
                "the guest is on another machine: `pip install nixl` on both, and give "
                "--migration-transport nixl"
            )
        return create(NIXL, msgspec.structs.replace(options, in_gpu_memory=True))

    def accept(self, timeout_s: float) -> StreamChannel:
        """Wait for the host, on the guest's side.

        Another process that waits at the same path is an earlier start of this guest, whose order
        to start was taken for lost and repeated: the host connects to the later start.

        Raises:
            TransportError: No host with the secret connects in time, or listening is impossible.
        """
        if self.channel.startswith(_TCP):
            return accept_tcp(self.channel.removeprefix(_TCP), self._options, timeout_s)
        path = Path(self.channel)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        own = None
        try:
            os.fchmod(listener.fileno(), 0o600)
            with _alone_in(path.parent):
                path.unlink(missing_ok=True)
                listener.bind(self.channel)
                own = path.stat().st_ino
            listener.listen(1)
            listener.settimeout(timeout_s)
            sock, _ = listener.accept()
        except TimeoutError:
            raise TransferTimeoutError(f"no host has come to {path.name}") from None
        except OSError as error:
            raise PeerGoneError(f"cannot listen at {path}: {error.strerror}") from error
        finally:
            # The folder is gone if the run has ended in the meantime.
            with contextlib.suppress(FileNotFoundError), _alone_in(path.parent):
                if path.stat().st_ino == own:
                    path.unlink()
            listener.close()
        return over_unix(sock)

    def connect(self, timeout_s: float) -> StreamChannel:
        """Connect to the guest, on the host's side.

        Raises:
            TransportError: The guest does not answer.
        """
        where = self.channel if self.channel.startswith(_TCP) else f"unix:{self.channel}"
        return connect(where, self._options, timeout_s)

    @property
    def _options(self) -> TransportOptions:
        return TransportOptions(
            folder=self.folder,
            secret=bytes.fromhex(self.secret),
            host=self.listen_host,
            device=self.rank,
        )


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other starts of a guest from taking or removing a path in ``folder``.

    Each of these has two steps, between which another start could take its successor's path for its
    own and remove it.
    """
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


class AttentionSlice(msgspec.Struct, frozen=True):
    """Parameters with which a guest builds the attention of some KV heads of one layer.

    Attributes:
        num_heads: Number of query heads of these KV heads together.
        sliding_window: Sliding window that the attention was built with; None if it has none.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None


class KvShape(msgspec.Struct, frozen=True):
    """Layout of the host's KV cache; a guest uses the same block ids.

    Attributes:
        num_blocks: Number of blocks to reserve room for: the maximum of the host's pool.
        block_shape: Shape of one block of one layer with all its heads, ``[heads, ...]``.
        layout: vLLM's name of the layout.
    """

    num_blocks: int
    block_shape: tuple[int, ...]
    dtype: str
    layout: str
    block_size_tokens: int


class StorePlace(msgspec.Struct, frozen=True):
    """Store of a host.

    Attributes:
        client_name: Name of the host at the store: slots that the host has reserved are given to
            no other owner before every process that connects by this name is dead.
    """

    socket: str
    client_name: str
    fingerprint: Fingerprint


class SlotCopies(msgspec.Struct, frozen=True):
    """Blocks of a unit, and the slots of the store that the host has reserved for them.

    Attributes:
        slots: Slot of the pool for each block.
    """

    generation: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


class GuestHello(msgspec.Struct, frozen=True, tag=True):
    """First message; ``token`` is the secret that the guest was started with."""

    token: str


class Build(msgspec.Struct, Generic[Unit], frozen=True, tag="Build"):
    """Request to build a unit.

    Attributes:
        num_backed_blocks: Number of blocks, from the first, that get their memory before the
            answer.
        path: Path of the model's list of layers in the model.
        slices: Attention of each layer, if its heads or blocks move without weights.
        store: Store that the guest may save blocks to itself; None if it may not.
    """

    unit_id: str
    kv: KvShape
    num_backed_blocks: int
    modules: Unit
    path: str = ""
    slices: tuple[AttentionSlice, ...] = ()
    store: StorePlace | None = None


class Activate(msgspec.Struct, frozen=True, tag=True):
    """Request to run the unit from now on, for messages and copies of this epoch only."""

    unit_id: str
    epoch: int


class ReleaseUnit(msgspec.Struct, frozen=True, tag=True):
    """Request to release a unit, its weights and its KV."""

    unit_id: str


class CopyPages(msgspec.Struct, frozen=True, tag=True):
    """Request to copy pages from a unit's region to its device or back, if its KV is on a device.

    Attributes:
        start: Offset of the first page in the region, in bytes; pages are grouped by attention.
        blocks: Block ids, the same for each of the attentions.
    """

    unit_id: str
    epoch: int
    to_device: bool
    start: int
    names: tuple[str, ...]
    blocks: tuple[int, ...]


class Run(msgspec.Struct, frozen=True):
    """Request to run one step of a unit, or of one layer; each kind of unit adds its own fields."""

    unit_id: str
    epoch: int

    @property
    def writes_store(self) -> bool:
        """Return whether the guest writes to slots of the host's store before it answers."""
        return False


class SetShare(msgspec.Struct, frozen=True, tag=True):
    """Request to compute for at most this fraction of the time from now on, in (0, 1]."""

    fraction: float


class UseLane(msgspec.Struct, frozen=True, tag=True):
    """Request to pass tensors and KV in memory of GPUs from now on: the host reaches the lane."""


_CONTROL = GuestHello | UseLane | Activate | ReleaseUnit | CopyPages | SetShare
Request = _CONTROL | Build[Any] | Run


class GuestReady(msgspec.Struct, frozen=True, tag=True):
    """Answer to ``GuestHello``.

    Attributes:
        lane: Region in memory of the guest's GPU for the tensors of steps; None if it offers none.
        no_lane: Reason why it offers none; empty on a CPU, where none is needed.
    """

    pid: int
    lane: RegionDescriptor | None = None
    no_lane: str = ""


class Built(msgspec.Struct, frozen=True, tag=True):
    """Answer to ``Build``: the unit is built and its KV is offered.

    Attributes:
        places: Offset of each attention's KV in the region, in bytes, by name.
        landing_bytes: Bytes of a region that only holds pages on their way, see ``CopyPages``; 0
            if the region holds the KV itself.
    """

    region: RegionDescriptor
    places: dict[str, int]
    weight_bytes: int
    saves: bool = False
    landing_bytes: int = 0


class StepsDone(msgspec.Struct, frozen=True, tag=True):
    pass


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """Outputs of a step: indices of the message's tensors, or None for an output that is None.

    Attributes:
        seconds: Time to compute the outputs.
        save_s: Time to save the blocks, in seconds; None if the host has to save them.
    """

    values: tuple[int | None, ...]
    seconds: float = 0.0
    save_s: float | None = None


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """Answer to a refused request, which changed nothing; ``reason`` is for people."""

    reason: str


Reply = GuestReady | Built | StepsDone | StepOutputs | RequestRefused

_NO_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that a decoder raises; invalid UTF-8 raises one of Python's own."""
encode = msgspec.msgpack.Encoder().encode
_replies = msgspec.msgpack.Decoder(Reply)


def decode_reply(body: bytes) -> Reply:
    """Decode a guest's answer.

    Raises:
        ProtocolError: The body is no valid answer.
    """
    try:
        return _replies.decode(body)
    except _NO_MESSAGE as error:
        raise ProtocolError(f"that is no guest's answer: {str(error)!r}") from None


def request_decoder(of_units: Iterable[type[Build[Any]] | type[Run]]) -> Callable[[bytes], Request]:
    """Return a decoder of a host's messages: those to every guest, and those of ``of_units``.

    The decoder raises ``msgspec.MsgspecError`` for any other message.
    """
    known = functools.reduce(operator.or_, of_units, _CONTROL)
    decode = msgspec.msgpack.Decoder(known).decode

    def read(body: bytes) -> Request:
        try:
            return decode(body)
        except _NO_MESSAGE as error:
            raise msgspec.DecodeError(str(error)) from None

    return read
