"""Messages between a host and its guest. Tensors travel beside a message, not in it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import operator
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from banaserve.errors import ProtocolError
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.transport.connect import accept_tcp, connect, over_unix
from banaserve.transport.errors import PeerGoneError, TransferTimeoutError
from banaserve.transport.interface import Channel, RegionDescriptor, Transport, TransportOptions
from banaserve.transport.registry import create

_TCP = "tcp:"


class GuestAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address and secret of a guest, made by the coordinator for the guest and its host.

    Attributes:
        guest_id: Of the guest: one for each host and target, or for each move.
        channel: Where the guest answers: path of a Unix socket, or ``tcp:HOST:PORT``.
        token: Secret that the host shows.
        transport: Name of the transport for KV.
        folder: Private folder of the run.
        secret: Of the transports of the run, in hex, at least 32 digits.
        listen_host: Address for transports that use TCP.
        target: Id of the instance beside which the guest runs, on the same devices.
        is_elsewhere: Whether the host runs on another machine than the guest.
        rank: Of the host's worker that it serves: a guest has a process for each.
        rendezvous: Where these processes find each other; empty where there is one.
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
        """For either side.

        Raises:
            UserError: There is no such transport here.
        """
        return create(self.transport, self._options)

    def accept(self, timeout_s: float) -> Channel:
        """The guest's side: wait for the host.

        Whoever waits at the same path is an earlier start of this guest, whose order was taken for
        lost and given again: the host comes to the later one.

        Raises:
            TransportError: No guest connects, or a process without the secret.
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
            # The folder is gone where the run has ended meanwhile.
            with contextlib.suppress(FileNotFoundError), _alone_in(path.parent):
                if path.stat().st_ino == own:
                    path.unlink()
            listener.close()
        return over_unix(sock)

    def connect(self, timeout_s: float) -> Channel:
        """The host's side.

        Raises:
            TransportError: The guest does not answer.
        """
        where = self.channel if self.channel.startswith(_TCP) else f"unix:{self.channel}"
        return connect(where, self._options, timeout_s)

    @property
    def _options(self) -> TransportOptions:
        return TransportOptions(
            folder=self.folder, secret=bytes.fromhex(self.secret), host=self.listen_host
        )


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other starts of a guest from taking or leaving a path of ``folder``.

    Between the two steps of either, another start would take the path of its successor for its own,
    and remove it.
    """
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


class AttentionSlice(msgspec.Struct, frozen=True):
    """Some KV heads of one layer, as a guest has to build their attention.

    Attributes:
        name: Of the layer's attention on the host.
        num_heads: Query heads, of all KV heads together.
        num_kv_heads: How many move.
        sliding_window: As the attention was built; None where there is none.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None


class KvShape(msgspec.Struct, frozen=True):
    """How the host lays its KV cache out: a guest uses the same block ids.

    Attributes:
        num_blocks: Room to reserve, as many as the host's pool can ever have.
        block_shape: Of one block of one layer with all its heads, ``[heads, ...]``.
        dtype: Of its elements.
        layout: vLLM's name of it.
        block_size_tokens: Tokens in a block.
    """

    num_blocks: int
    block_shape: tuple[int, ...]
    dtype: str
    layout: str
    block_size_tokens: int


class StorePlace(msgspec.Struct, frozen=True):
    """The store of a host.

    Attributes:
        socket: Where it listens.
        client_name: Of the host there: what the host has reserved is given to no other owner before
            every process that connects by this name is dead.
    """

    socket: str
    client_name: str
    fingerprint: Fingerprint


class SlotCopies(msgspec.Struct, frozen=True):
    """Blocks of a unit, and the slots of the store that the host has reserved for them.

    Attributes:
        generation: Of the store's pool.
        slots: Of each block, which slot of the pool.
    """

    generation: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


class GuestHello(msgspec.Struct, frozen=True, tag=True):
    """First message; ``token`` is the secret that the guest was started with."""

    token: str
    host: str


class Build(msgspec.Struct, frozen=True):
    """Build a unit; each kind of unit adds what it needs.

    Attributes:
        num_backed_blocks: The first ones, which get their memory before the answer.
    """

    unit_id: str
    kv: KvShape
    num_backed_blocks: int

    @property
    def loads_weights(self) -> bool:
        """Whether the guest reads a checkpoint, which takes seconds."""
        return False


class Activate(msgspec.Struct, frozen=True, tag=True):
    """From here on the unit runs, for messages of this epoch only, and takes no copies of old."""

    unit_id: str
    epoch: int


class ReleaseUnit(msgspec.Struct, frozen=True, tag=True):
    """Forget a unit, its weights and its KV."""

    unit_id: str


class CopyPages(msgspec.Struct, frozen=True, tag=True):
    """Take pages from the unit's region to its device, or give them: where KV is not in the region.

    Attributes:
        epoch: As the region's.
        start: Of the first page in the region, in bytes; pages lie attention by attention.
        blocks: Of each of the attentions.
    """

    unit_id: str
    epoch: int
    to_device: bool
    start: int
    names: tuple[str, ...]
    blocks: tuple[int, ...]


class Run(msgspec.Struct, frozen=True):
    """One step of a unit, or of one layer of it; each kind of unit adds what it needs."""

    unit_id: str
    epoch: int

    @property
    def writes_store(self) -> bool:
        """Whether the guest writes to slots of the host's store before it answers."""
        return False


class GetUsage(msgspec.Struct, frozen=True, tag=True):
    pass


class SetShare(msgspec.Struct, frozen=True, tag=True):
    """Compute for at most this fraction of the time from here on, in (0, 1]."""

    fraction: float


Request = GuestHello | Build | Activate | ReleaseUnit | CopyPages | Run | GetUsage | SetShare
_CONTROL = GuestHello | Activate | ReleaseUnit | CopyPages | GetUsage | SetShare


class GuestReady(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Built(msgspec.Struct, frozen=True, tag=True):
    """A unit is there and its KV is offered.

    Attributes:
        region: With the KV of all its attentions, or pages on their way to it.
        places: Offset of each attention's KV in the region, by name.
        weight_bytes: Of the parameters that were loaded.
        seconds: That it took.
        saves: Whether the guest can save blocks of it to the store.
        landing_bytes: Of a region that only has pages on their way, see ``CopyPages``; 0: the
            region holds the KV itself.
    """

    unit_id: str
    region: RegionDescriptor
    places: dict[str, int]
    weight_bytes: int
    seconds: float
    saves: bool = False
    landing_bytes: int = 0


class StepsDone(msgspec.Struct, frozen=True, tag=True):
    pass


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """What was returned: one tensor, or a tuple of them, by index; None stays None.

    Attributes:
        seconds: That computing it took.
        save_s: That saving took; None where the host has to save.
    """

    is_tuple: bool
    values: tuple[int | None, ...]
    seconds: float = 0.0
    save_s: float | None = None


class GuestUsage(msgspec.Struct, frozen=True, tag=True):
    """Resources that a guest uses.

    Attributes:
        resident_bytes: Of the whole process, pages that it shares with its parent included.
        own_bytes: Of pages that no other process shares.
        weight_bytes: Of the layers that it has built.
        busy_s: Processor time spent computing since it was asked last, of all its threads alike.
        num_runs: Runs of units since then.
    """

    resident_bytes: int
    own_bytes: int
    weight_bytes: int
    busy_s: float
    num_runs: int


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """The request was refused and nothing has changed; ``reason`` is for people."""

    reason: str


Reply = GuestReady | Built | StepsDone | StepOutputs | GuestUsage | RequestRefused

_NO_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What a decoder raises: wrong UTF-8 is an error of Python's own."""
encode = msgspec.msgpack.Encoder().encode
_replies = msgspec.msgpack.Decoder(Reply)


def decode_reply(body: bytes) -> Reply:
    """Decode a guest's answer.

    Raises:
        ProtocolError: It is no answer.
    """
    try:
        return _replies.decode(body)
    except _NO_MESSAGE as error:
        raise ProtocolError(f"that is no guest's answer: {str(error)!r}") from None


def request_decoder(of_units: Iterable[type[Build] | type[Run]]) -> Callable[[bytes], Request]:
    """What reads a host's messages: those of every guest, and those of the units that it knows.

    The function that is returned raises ``msgspec.MsgspecError`` for anything else.
    """
    known = functools.reduce(operator.or_, of_units, _CONTROL)
    decode = msgspec.msgpack.Decoder(known).decode

    def read(body: bytes) -> Request:
        try:
            return decode(body)
        except _NO_MESSAGE as error:
            raise msgspec.DecodeError(str(error)) from None

    return read
