"""Messages between a server and the agents of its nodes, inside TLS on which both have proved that
they know the cluster's key.

A connection that begins with ``OpenSession`` is the session; one that begins with ``JoinSession``
is one process of that session. ``Inspect``, ``MeasureLink`` and ``EchoLink`` need no session.
"""

from __future__ import annotations

import functools
import operator
from typing import Annotated

import msgspec

from banaserve.base.net.framing import Framing
from banaserve.base.plugins.discovery import installed_version, vllm_version

PROTOCOL = 7
MAX_MESSAGE_BYTES = 1 << 20
MAX_CHANNELS = 64
"""Maximum connections of one process at once; an engine opens one to each of 3 sockets."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Word = Annotated[str, msgspec.Meta(max_length=1 << 16)]
_Words = Annotated[tuple[_Word, ...], msgspec.Meta(max_length=4096)]
_Settings = Annotated[dict[_Name, _Word], msgspec.Meta(max_length=64)]
_Channel = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


def own_version() -> str:
    """Return the versions of banaserve and vLLM here, in one line; the same on server and nodes."""
    vllm = vllm_version()
    engine = f"vLLM {vllm}" if vllm else "no vLLM"
    return f"banaserve {installed_version('banaserve')}, {engine}"


class NodeMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Any message between a server and an agent."""


class OpenSession(NodeMessage, frozen=True):
    """Request of a server to take this node.

    Attributes:
        protocol: ``PROTOCOL`` of the server.
        version: Versions of the server's banaserve and vLLM; both must equal those of the node.
        server: Name of the server, reported to another server that asks for the node.
    """

    protocol: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    version: _Name
    server: _Name


class SessionOpened(NodeMessage, frozen=True):
    """Answer that the server has the node for as long as the connection lasts.

    Attributes:
        incarnation: Identifier of the session; a later session at the same address has another.
        folder: Folder of the sockets of the session's processes.
        gpus: Names of the node's GPUs, as in CUDA_VISIBLE_DEVICES.
        memory_bytes: Available memory of the node, in bytes.
        num_processors: Number of processors that the agent may use.
    """

    incarnation: _Name
    folder: _Name
    gpus: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=64)]
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    num_processors: Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class NodeStore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a node's store: as in ``kvstore/daemon/options.py:StoreOptions``.

    Attributes:
        listen: ``HOST:PORT`` at which the stores of the other nodes fetch blocks from this store.
        peers: ``HOST:PORT`` of the stores of the other nodes.
        key: Key that all these stores share.
    """

    size: _Name
    ssd: _Word
    ssd_size: _Name
    distributed: _Word
    tenant_quota: float
    kept_quota: float
    verify_memory: bool
    listen: _Name
    peers: _Words
    key: _Word


class PrepareNode(NodeMessage, frozen=True):
    """Order to make the node ready for engines.

    Attributes:
        vllm_argv: vLLM options of engines that are started without options of their own.
        forks: True if engines are forked from one parent; False if each starts from scratch.
        environment: Environment variables of engines, unless the node's user has set them.
        devices_each: Number of GPUs of an instance; 0 on CPU.
        store: Options of the node's store; None for no store.
        model_digest: See ``JoinSession``.
    """

    vllm_argv: _Words
    forks: bool
    environment: _Settings = {}
    devices_each: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    store: NodeStore | None = None
    model_digest: _Word = ""


class Done(NodeMessage, frozen=True):
    """Answer that an order has been carried out, or will be as soon as the store runs again."""


class FreePort(NodeMessage, frozen=True):
    """Query for a port on which nothing listens at present."""


class PortFound(NodeMessage, frozen=True):
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class SetStorePeers(NodeMessage, frozen=True):
    """Order that the node's store fetch blocks from the stores at these ``HOST:PORT`` only."""

    peers: _Words


class StoreRestarted(NodeMessage, frozen=True):
    """Notice that the node's store had ended and runs again."""


class JoinSession(NodeMessage, frozen=True):
    """Order to start a process in the session ``incarnation``; the connection stands for it.

    Attributes:
        engine: Id of the instance, for an engine core.
        stem: Prefix of the names of the engine's sockets.
        guest: JSON of a guest's ``GuestAddress``, to start a guest instead of an engine.
        vllm_argv: vLLM options of the process; empty for those that the node was prepared with.
        model_digest: Digest of the server's files of the model that the options name; empty if the
            server has no such files.
        instances: All instances that the server has on this node; the devices of others are freed.
    """

    incarnation: _Name
    engine: Annotated[str, msgspec.Meta(max_length=128, pattern="^[a-z0-9]*$")] = ""
    stem: Annotated[str, msgspec.Meta(max_length=128, pattern="^[a-z0-9.]*$")] = ""
    guest: Annotated[bytes, msgspec.Meta(max_length=1 << 16)] = b""
    vllm_argv: _Words = ()
    model_digest: _Word = ""
    instances: _Words = ()


class ProcessDying(NodeMessage, frozen=True):
    """Notice that the process has begun to end; its memory may not be free yet."""


class ProcessEnded(NodeMessage, frozen=True):
    """Notice that the process has ended: the last message of its connection."""


class ChannelOpened(NodeMessage, frozen=True):
    """Notice that a process on the node has connected to the socket with this name suffix."""

    channel: _Channel
    name: _Name


class ChannelClosed(NodeMessage, frozen=True):
    channel: _Channel


class Data(NodeMessage, frozen=True):
    """Bytes of a channel: those of a Unix socket, or of a measurement."""

    channel: _Channel
    content: bytes


class LogWritten(NodeMessage, frozen=True):
    """Bytes that a process has written to its log."""

    written: bytes


class Inspect(NodeMessage, frozen=True):
    """Query for the resources of the node.

    Attributes:
        vllm_argv: vLLM options that name the model, like those of an engine.
        model_digest: See ``JoinSession``.
    """

    vllm_argv: _Words = ()
    model_digest: _Word = ""


class Inspected(NodeMessage, frozen=True):
    """Resources of a node.

    Attributes:
        version: Versions of the node's banaserve and vLLM.
        python: Release of Python on the node.
        gpus: Names of the node's GPUs, as in CUDA_VISIBLE_DEVICES.
        time_s: Clock of the node, in seconds since 1970.
        model_problem: Reason why the node cannot serve the model; empty if it can.
        server: Name of the server that uses the node; empty for none.
    """

    version: _Name
    python: _Name
    gpus: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=64)]
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    num_processors: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    time_s: float
    model_problem: _Word = ""
    server: Annotated[str, msgspec.Meta(max_length=128)] = ""


class MeasureLink(NodeMessage, frozen=True):
    """Query for the distance from this node to another node."""

    host: _Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class LinkMeasured(NodeMessage, frozen=True):
    """Round-trip time inside TLS, and throughput in one direction outside of TLS.

    Attributes:
        problem: Reason why nothing was measured; empty if the measurement succeeded.
    """

    round_trip_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    problem: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class EchoLink(NodeMessage, frozen=True):
    """Order to send back all bytes that come on channel 1 after this message."""


class EchoOpened(NodeMessage, frozen=True):
    """Answer that ``port`` discards all bytes of a connection that begins with ``token``."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Beat(NodeMessage, frozen=True):
    """Heartbeat, without content."""


class NodeRefused(NodeMessage, frozen=True):
    """Refusal with its reason in one line; the connection ends."""

    reason: Annotated[str, msgspec.Meta(max_length=4096)]


_KINDS = functools.reduce(operator.or_, NodeMessage.__subclasses__())
FRAMING: Framing[NodeMessage] = Framing(_KINDS, MAX_MESSAGE_BYTES)
