"""Messages between the server and the engine parent, over a private socket pair, and the start of
new (unforked) processes from launch descriptions."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from banaserve.base.net import framing
from banaserve.base.net.framing import Framing, MessageReader
from banaserve.base.platform.processes import spawn_module
from banaserve.migration.rpc.messages import GuestAddress

MAX_MESSAGE_BYTES = 1 << 20
_MODULE = "banaserve.mains.spawned"


class StartEngine(msgspec.Struct, tag=True, frozen=True):
    """Order to start an engine core that connects to ``handshake_address``; logs to ``log_path``.

    An engine parent forks the core; a new process that reads the order becomes the core.

    Attributes:
        vllm_argv: vLLM's options; empty for those that the launcher was made with.
        until_s: Time on the monotonic clock, in seconds, after which a parent that reads the order
            ignores it; 0 for no limit.
    """

    instance_id: str
    handshake_address: str
    log_path: str
    vllm_argv: tuple[str, ...] = ()
    until_s: float = 0.0


class StartGuest(msgspec.Struct, tag=True, frozen=True):
    """Order to start a guest that answers at ``address``; see ``StartEngine``."""

    address: GuestAddress
    log_path: str
    vllm_argv: tuple[str, ...] = ()
    until_s: float = 0.0


class ParentLaunch(msgspec.Struct, tag=True, frozen=True):
    """Launch description of an engine parent; orders arrive at the descriptor ``control``."""

    vllm_argv: list[str]
    control: int


class Started(msgspec.Struct, tag=True, frozen=True):
    """Answer to an order: ``name`` is the id of the instance, or of the guest."""

    name: str
    pid: int


class ParentReady(msgspec.Struct, tag=True, frozen=True):
    """Report that an engine parent in a new process takes orders."""


Order = StartEngine | StartGuest
Launch = Order | ParentLaunch
Message = Order | Started | ParentReady
FRAMING: Framing[Message] = Framing(Message, MAX_MESSAGE_BYTES)


def name_of(order: Order) -> str:
    """Return the id of the instance or guest that an order starts."""
    return order.instance_id if isinstance(order, StartEngine) else order.address.guest_id


def send(sock: socket.socket, message: Message) -> None:
    """Send a message.

    Raises:
        ProtocolError: The message is too large; nothing has been sent.
    """
    sock.sendall(FRAMING.encode(message))


def receive(sock: socket.socket) -> Message | None:
    """Receive the next message; return None when the other side has closed.

    Raises:
        ProtocolError: The received bytes are not a message, or it is too large.
    """
    try:
        return framing.receive(sock.recv, MessageReader(FRAMING))
    except ConnectionResetError:
        return None


def spawn(
    launch: Launch,
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    in_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process; call from a thread that lives as long as the process is to live.

    Args:
        in_session: True if the process stays in this process's session.

    Raises:
        OSError: The system has no resources for another process.
    """
    return spawn_module(
        _MODULE,
        (str(os.getpid()),),
        msgspec.json.encode(launch),
        environment,
        pass_fds=pass_fds,
        in_session=in_session,
    )
