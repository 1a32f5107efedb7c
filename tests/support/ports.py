"""Ports that stay free for the servers that are told of them."""

from __future__ import annotations

import socket
from contextlib import ExitStack

_OF_THIS_PROCESS = ExitStack()


def held_port(stack: ExitStack) -> int:
    """A port of the loopback on which only a server that is told of it listens.

    A socket is bound to it, without listening, until ``stack`` ends: the kernel gives the port to
    no socket that asks for any port and to no connection, and lets a server with ``SO_REUSEADDR``
    listen there, as often as it is started. A client finds it closed meanwhile.
    """
    holder = stack.enter_context(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port: int = holder.getsockname()[1]
    return port


def free_port() -> int:
    """The same, until this process ends."""
    return held_port(_OF_THIS_PROCESS)
