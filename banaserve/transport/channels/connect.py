"""Connections: the ways to connect the two ends of a channel."""

from __future__ import annotations

import os
import queue
import socket
import time
from pathlib import Path

from banaserve.base.platform.linux import is_own, peer_of
from banaserve.transport.channels import authentication
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.channels.stream import SocketStream
from banaserve.transport.errors import (
    PeerGoneError,
    RefusedError,
    TransferTimeoutError,
)
from banaserve.transport.interface import TransportOptions
from banaserve.transport.threaded_server import MAX_STRANGERS, ConnectionPlaces, Service

_BACKLOG = 16
_STRANGER_S = 1.0
"""Maximum time for a connecting process to prove that it knows the secret, in seconds, while
``accept_tcp`` waits for the right peer."""


def connect(address: str, options: TransportOptions, timeout_s: float) -> StreamChannel:
    """Connect to a listener.

    Raises:
        PeerGoneError: Nothing listens at the address.
        TransferTimeoutError: There is no answer in time.
        RefusedError: The address is invalid, or the listener is not one of this run.
    """
    deadline = time.monotonic() + timeout_s
    kind, _, rest = address.partition(":")
    if kind == "unix":
        return over_unix(_connect(socket.AF_UNIX, os.fspath(Path(rest)), timeout_s))
    if kind == "tcp":
        sock = connect_tcp(rest, timeout_s)
        return over_tcp(sock, options.secret, deadline, listening=False)
    raise RefusedError(f"{address!r} begins with neither unix: nor tcp:")


def accept_tcp(host_and_port: str, options: TransportOptions, timeout_s: float) -> StreamChannel:
    """Wait at an address for the one peer that knows the secret; others are refused.

    Args:
        host_and_port: ``HOST:PORT`` to listen on until the peer has connected.

    Raises:
        PeerGoneError: The address cannot be listened on.
        TransferTimeoutError: The peer has not connected in time.
        RefusedError: The address is invalid.
    """
    family, address = _tcp_place(host_and_port)
    try:
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise PeerGoneError(f"cannot listen at {host_and_port}: {error.strerror}") from error
    found: queue.SimpleQueue[StreamChannel] = queue.SimpleQueue()

    def welcome(sock: socket.socket) -> None:
        until_s = time.monotonic() + _STRANGER_S
        channel = over_tcp(sock.dup(), options.secret, until_s, listening=True)
        sock.close()  # or the end of the service would end the connection
        found.put(channel)

    # A thread for each peer: a silent stranger delays no other.
    service = Service("accept", listener, welcome, ConnectionPlaces(num_strangers=MAX_STRANGERS))
    try:
        return found.get(timeout=timeout_s)
    except queue.Empty:
        raise TransferTimeoutError("nobody has connected in time") from None
    finally:
        service.close()


def over_unix(sock: socket.socket) -> StreamChannel:
    """Return a channel over a connected Unix socket, for instance of a socket pair.

    Raises:
        RefusedError: The peer is run by another user.
    """
    peer = peer_of(sock)
    if not is_own(peer):
        sock.close()
        raise RefusedError(f"the peer is run by user {peer.uid}")
    return StreamChannel(SocketStream(sock))


def over_tcp(
    sock: socket.socket, secret: bytes, deadline: float, *, listening: bool
) -> StreamChannel:
    """Authenticate the peer of a connected TCP socket and return a channel over it.

    Raises:
        RefusedError: The peer does not know the secret.
        PeerGoneError: The peer is gone, perhaps because it does not accept this side's proof.
        TransferTimeoutError: The peer does not answer in time.
    """
    stream = SocketStream(sock)
    try:
        shake = authentication.welcome if listening else authentication.greet
        return StreamChannel(stream, shake(stream, secret, deadline))
    except BaseException:
        stream.close()
        raise


def tcp_address(sock: socket.socket) -> str:
    """Return the ``tcp:HOST:PORT`` of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"tcp:{host}:{port}"


def connect_tcp(host_and_port: str, timeout_s: float) -> socket.socket:
    """Connect to ``HOST:PORT``.

    Raises:
        RefusedError: ``host_and_port`` is invalid.
        PeerGoneError: Nothing listens at the address.
        TransferTimeoutError: There is no answer in time.
    """
    return _connect(*_tcp_place(host_and_port), timeout_s)


def _tcp_place(host_and_port: str) -> tuple[int, tuple[str, int]]:
    host, _, port = host_and_port.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise RefusedError(f"{host_and_port!r} is no HOST:PORT")
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, int(port))


def _connect(family: int, address: str | tuple[str, int], timeout_s: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(max(0.001, timeout_s))
    try:
        sock.connect(address)
    except TimeoutError:
        sock.close()
        raise TransferTimeoutError(f"nobody answers at {address}") from None
    except OSError as error:
        sock.close()
        raise PeerGoneError(f"nobody listens at {address}: {error}") from None
    return sock
