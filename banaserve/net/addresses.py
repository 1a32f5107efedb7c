"""Addresses that users write."""

from __future__ import annotations

from banaserve.errors import UserError

_MAX_PORT = 65535


def host_and_port(option: str, text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; a host that is an IPv6 address may stand in brackets.

    Raises:
        UserError: It is no such text.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or " " in host or not port.isdecimal() or not 0 < int(port) <= _MAX_PORT:
        raise UserError(f"{option} {text!r}: write HOST:PORT")
    return host, int(port)
