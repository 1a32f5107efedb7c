"""Messages between the supervisor and the engine parent, over a private socket pair, and launch
descriptions of new (unforked) processes."""

from __future__ import annotations

import socket

import msgspec

from banaserve.base.net import framing
from banaserve.base.net.framing import Framing, MessageReader
from banaserve.migration.rpc.messages import GuestAddress

MAX_MESSAGE_BYTES = 1 << 20


class StartEngine(msgspec.Struct, tag=True, frozen=True):
    """Order to fork an engine core that connects to ``handshake_address`` and logs to ``log_path``.

    Attributes:
        vllm_argv: vLLM's options; empty for those that the engine parent was made with.
        until_s: Time on the monotonic clock, in seconds, after which a parent that reads the order
            ignores it; 0 for no limit.
    """

    instance_id: str
    handshake_address: str
    log_path: str
    vllm_argv: tuple[str, ...] = ()
    until_s: float = 0.0


class StartGuest(msgspec.Struct, tag=True, frozen=True):
    """Order to fork a guest that answers at ``address`` and logs to ``log_path``.

    Attributes:
        vllm_argv: vLLM's options of the host's engine, as in ``StartEngine``.
        until_s: Time limit, as in ``StartEngine``.
    """

    address: GuestAddress
    log_path: str
    vllm_argv: tuple[str, ...] = ()
    until_s: float = 0.0


class EngineLaunch(msgspec.Struct, frozen=True):
    """Launch description that an engine core in a new process reads."""

    instance_id: str
    vllm_argv: list[str]
    handshake_address: str
    log_path: str


class GuestLaunch(msgspec.Struct, frozen=True):
    """Launch description that a guest in a new process reads.

    Attributes:
        vllm_argv: vLLM's options of the host's engine.
    """

    address: GuestAddress
    vllm_argv: list[str]
    log_path: str


class ParentLaunch(msgspec.Struct, frozen=True):
    """Launch description that an engine parent in a new process reads.

    Attributes:
        control: File descriptor of the socket that orders arrive at.
    """

    vllm_argv: list[str]
    control: int


class GuestStarted(msgspec.Struct, tag=True, frozen=True):
    guest_id: str
    pid: int


class EngineStarted(msgspec.Struct, tag=True, frozen=True):
    instance_id: str
    pid: int


class EngineExited(msgspec.Struct, tag=True, frozen=True):
    """Report that an engine or a guest has ended.

    Attributes:
        status: Exit status as from ``os.waitstatus_to_exitcode``; negative for a signal.
    """

    pid: int
    status: int


class ParentReady(msgspec.Struct, tag=True, frozen=True):
    """Report that an engine parent in a new process takes orders."""


Order = StartEngine | StartGuest
Message = Order | EngineStarted | EngineExited | GuestStarted | ParentReady
FRAMING: Framing[Message] = Framing(Message, MAX_MESSAGE_BYTES)


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
