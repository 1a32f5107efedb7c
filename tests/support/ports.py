"""Ports that stay free for who is meant to listen there."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def held_port(stack: ExitStack) -> int:
    """A port of the loopback that only a server told of it listens on, until ``stack`` ends.

    A socket is bound to it without listening: the kernel gives the port to nobody who asks for
    any, and lets a server with ``SO_REUSEADDR`` listen there, as often as it is started.
    """
    holder = stack.enter_context(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port: int = holder.getsockname()[1]
    return port
