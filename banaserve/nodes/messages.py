"""Messages between a server and the agents of its nodes, inside TLS on which both have shown that
they know the cluster's key.

A connection begins with ``OpenSession``, and is the session then, or with ``JoinSession``, and is
one process of it; ``Inspect``, ``MeasureLink`` and ``EchoLink`` need no session. A frame of channel
0 is a message; of others, bytes of a Unix socket, or of what is measured.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from banaserve.errors import ProtocolError

PROTOCOL = 3
MAX_FRAME_BYTES = 1 << 20
MAX_CHANNELS = 64
"""Connections of one process at once: an engine opens one to each of three sockets."""
MAX_WAIT_S = 600.0

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Word = Annotated[str, msgspec.Meta(max_length=1 << 16)]
_Words = Annotated[tuple[_Word, ...], msgspec.Meta(max_length=4096)]
_Settings = Annotated[dict[_Name, _Word], msgspec.Meta(max_length=64)]
_Channel = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class _Said(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class OpenSession(_Said, frozen=True):
    """A server wants this node.

    Attributes:
        protocol: ``PROTOCOL`` of the server.
        version: Of its banaserve and vLLM: both have to be the same.
        server: Whom to name to another server that comes.
    """

    protocol: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    version: _Name
    server: _Name


class SessionOpened(_Said, frozen=True):
    """The node is this server's while the connection lasts.

    Attributes:
        incarnation: Of the session: another one on the same address has another.
        folder: Where the sockets of its processes will be.
        gpus: Names of its GPUs, as in CUDA_VISIBLE_DEVICES.
        memory_bytes: Available.
        num_processors: For it to use.
    """

    incarnation: _Name
    folder: _Name
    gpus: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=64)]
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    num_processors: Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class NodeStore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a node's store: as in ``kvstore/daemon/options.py:StoreOptions``.

    Attributes:
        listen: Where the stores of the other nodes fetch blocks.
        peers: Where those listen.
        key: That they share.
    """

    size: _Name
    ssd: _Word
    ssd_size: _Name
    distributed: _Word
    tenant_quota: float
    verify_memory: bool
    listen: _Name
    peers: _Words
    key: _Word


class PrepareNode(_Said, frozen=True):
    """Make the node ready for engines.

    Attributes:
        vllm_argv: Of engines that are started without options.
        forks: Whether engines are forked from one parent, or each starts from nothing.
        environment: Variables that engines are to have, unless the node's user has set them.
        devices: CUDA_VISIBLE_DEVICES by instance; empty on CPU.
        devices_each: Of an instance that is added.
        store: Of the node; None for no store.
        model_digest: See ``JoinSession``.
    """

    vllm_argv: _Words
    forks: bool
    environment: _Settings = {}
    devices: _Settings = {}
    devices_each: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    store: NodeStore | None = None
    model_digest: _Word = ""


class NodePrepared(_Said, frozen=True):
    """Engines may be started."""


class FreePort(_Said, frozen=True):
    """Ask for a port on which nothing listens at present."""


class PortFound(_Said, frozen=True):
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class SetStorePeers(_Said, frozen=True):
    """Let the node's store fetch blocks from those at these ``HOST:PORT``, and from no others."""

    peers: _Words


class StorePeersSet(_Said, frozen=True):
    """The store has been told, or is when it has been started again."""


class StoreRestarted(_Said, frozen=True):
    """The node's store had ended and runs again."""


class JoinSession(_Said, frozen=True):
    """Start a process in the session ``incarnation``; the connection stands for it.

    Attributes:
        engine: Id of the instance, for an engine core.
        stem: Of its sockets: their names begin with it.
        guest: JSON of a guest's ``GuestAddress``, for a guest instead.
        vllm_argv: Options; empty where they are those that the node was prepared with.
        model_digest: Of the files of the model in the options, as the server has them; empty where
            it has none.
        instances: All that this node has for the server; devices of others are free again.
    """

    incarnation: _Name
    engine: Annotated[str, msgspec.Meta(max_length=128, pattern="^[a-z0-9]*$")] = ""
    stem: Annotated[str, msgspec.Meta(max_length=128, pattern="^[a-z0-9.]*$")] = ""
    guest: Annotated[bytes, msgspec.Meta(max_length=1 << 16)] = b""
    vllm_argv: _Words = ()
    model_digest: _Word = ""
    instances: _Words = ()


class ProcessStarted(_Said, frozen=True):
    pid: Annotated[int, msgspec.Meta(ge=1)]


class ProcessDying(_Said, frozen=True):
    """It has begun to end; its memory may not have been given back."""


class ProcessEnded(_Said, frozen=True):
    """The last message of its connection."""


class ChannelOpened(_Said, frozen=True):
    """Something on the node has connected to the socket whose name ends like this."""

    channel: _Channel
    name: _Name


class ChannelClosed(_Said, frozen=True):
    channel: _Channel


class LogWritten(_Said, frozen=True):
    """What a process has written to its log."""

    written: Annotated[bytes, msgspec.Meta(max_length=MAX_FRAME_BYTES)]


class Inspect(_Said, frozen=True):
    """Ask what the node has.

    Attributes:
        vllm_argv: Options that name the model, as of an engine.
        model_digest: See ``JoinSession``.
    """

    vllm_argv: _Words = ()
    model_digest: _Word = ""


class Inspected(_Said, frozen=True):
    """What a node has.

    Attributes:
        version: Of its banaserve and vLLM.
        python: Its release.
        gpus: Names of its GPUs, as in CUDA_VISIBLE_DEVICES.
        time_s: Its clock, in seconds since 1970.
        model_problem: Why the model cannot be served there; empty where it can.
        server: That uses it; empty for none.
    """

    version: _Name
    python: _Name
    gpus: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=64)]
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    num_processors: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    time_s: float
    model_problem: _Word = ""
    server: Annotated[str, msgspec.Meta(max_length=128)] = ""


class MeasureLink(_Said, frozen=True):
    """Ask how far away another node is."""

    host: _Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class LinkMeasured(_Said, frozen=True):
    """A round trip inside TLS, and bytes that get through in one direction outside of it.

    Attributes:
        problem: Why nothing was measured; empty where it was.
    """

    round_trip_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    problem: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class EchoLink(_Said, frozen=True):
    """Send back what comes on channel 1 from here on."""


class EchoOpened(_Said, frozen=True):
    """Who connects to ``port`` and begins with ``token`` may send what is thrown away there."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Beat(_Said, frozen=True):
    """Nothing else was to be said."""


class NodeRefused(_Said, frozen=True):
    """In one line; the connection ends."""

    reason: Annotated[str, msgspec.Meta(max_length=4096)]


NodeMessage = (
    OpenSession
    | SessionOpened
    | PrepareNode
    | NodePrepared
    | FreePort
    | PortFound
    | SetStorePeers
    | StorePeersSet
    | StoreRestarted
    | JoinSession
    | ProcessStarted
    | ProcessDying
    | ProcessEnded
    | ChannelOpened
    | ChannelClosed
    | LogWritten
    | Inspect
    | Inspected
    | MeasureLink
    | LinkMeasured
    | EchoLink
    | EchoOpened
    | Beat
    | NodeRefused
)
_decoder = msgspec.msgpack.Decoder(NodeMessage)
encode = msgspec.msgpack.encode


def decode(body: bytes) -> NodeMessage:
    """The message in a frame.

    Raises:
        ProtocolError: It is none.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of a node: {error}") from None
