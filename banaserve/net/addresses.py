"""Addresses that users write."""

from __future__ import annotations

from banaserve.errors import UserError

_MAX_PORT = 65535


def host_and_port(option: str, text: str, least_port: int = 1) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; a host that is an IPv6 address may stand in brackets.

    Args:
        least_port: 0 where any free port will do.

    Raises:
        UserError: It is no such text.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or " " in host or not port.isdecimal() or not least_port <= int(port) <= _MAX_PORT:
        raise UserError(f"{option} {text!r}: write HOST:PORT")
    return host, int(port)


def written(host: str, port: int) -> str:
    """``HOST:PORT``, as ``host_and_port`` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
