"""Addresses as users write them."""

from __future__ import annotations

from contextlib import suppress

from banaserve.base.errors import UserError

_MAX_PORT = 65535


def host_and_port(option: str, text: str, least_port: int = 1) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; an IPv6 address may be in brackets.

    Args:
        least_port: Lowest port accepted; 0 to accept 0 for any free port.

    Raises:
        UserError: ``text`` has another form.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    with suppress(ValueError):  # of a host that no name can be, or of thousands of digits
        is_host = bool(host.encode("idna")) and " " not in host
        if is_host and port.isdecimal() and least_port <= int(port) <= _MAX_PORT:
            return host, int(port)
    raise UserError(f"{option} {text!r}: write HOST:PORT")


def written(host: str, port: int) -> str:
    """Return ``HOST:PORT``, as ``host_and_port`` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
