"""Where a server listens, as its users write it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from banaserve.errors import UserError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One HTTP server.

    Attributes:
        host: A name or an address; an IPv6 address without brackets.
    """

    host: str
    port: int
    is_tls: bool = False

    @property
    def authority(self) -> str:
        """As in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.authority}"


def parse_endpoint(url: str) -> Endpoint:
    """Returns what ``url`` names.

    Raises:
        UserError: It is not ``http[s]://HOST[:PORT]``; a path, a query or a password is too much.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    odd = parts.username or parts.password or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or odd or not url.isascii():
        raise UserError(f"{url!r} is no address of a server: write http://HOST:PORT")
    is_odd = any(char in parts.hostname for char in " \t\r\n\\%") or not url.isprintable()
    if is_odd or not _is_host(parts.hostname):
        raise UserError(f"{url!r} is no address of a server: write http://HOST:PORT")
    if parts.path not in ("", "/"):
        raise UserError(f"{url} has a path: write {parts.scheme}://{parts.netloc} alone")
    is_tls = parts.scheme == "https"
    if port == 0:
        raise UserError(f"{url!r} has port 0: write the port that the server listens on")
    return Endpoint(parts.hostname, port or (443 if is_tls else 80), is_tls)


def _is_host(host: str) -> bool:
    """Whether the resolver takes ``host``: it raises another error than for one it cannot find."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False
