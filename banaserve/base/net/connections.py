"""Table of open client connections: limits of their number, and eviction beyond them."""

from __future__ import annotations

import socket
from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

_IPV6_PREFIX_BYTES = 8
_MAPPED = "::ffff:"


class Evictable(Protocol):
    """A connection that can be closed in favour of another."""

    def evict(self) -> None: ...


ConnectionT = TypeVar("ConnectionT", bound=Evictable)


class ConnectionTable(Generic[ConnectionT]):
    """Open connections, in the order of their arrival.

    A client that has shown a valid key keeps its connection. Of the connections without a key, the
    oldest is evicted if there are too many: silent connections do not block clients with a key, and
    a new connection has time to show a key until the table has been filled once more.

    Attributes:
        max_per_address: Maximum number of connections without a key from one address; 0: a quarter
            of ``max_connections``. Connections with a key are not counted: a proxy has one address.
    """

    def __init__(self, max_connections: int, max_per_address: int = 0) -> None:
        self.max_connections = max_connections
        self.max_per_address = max_per_address
        self._all: dict[Hashable, ConnectionT] = {}
        self._anonymous: dict[Hashable, ConnectionT] = {}
        self._by_address: dict[bytes, dict[Hashable, ConnectionT]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[ConnectionT]:
        return iter(list(self._all.values()))

    def add(self, connection: ConnectionT, peer: Hashable) -> ConnectionT | None:
        """Add ``connection``; return the connection to close, which is no longer counted.

        A connection of the same peer is replaced: another protocol has taken it over.

        Args:
            peer: Address and port of the client.

        Returns:
            None if there is room; ``connection`` itself if all others have shown a key.
        """
        if peer in self._all:
            self._replace(connection, peer)
            return None
        self._all[peer] = self._anonymous[peer] = connection
        of_address = self._by_address.setdefault(address_of(peer), {})
        of_address[peer] = connection
        limit = self.max_per_address or max(1, self.max_connections // 4)
        if len(of_address) > limit:
            return self._pop_oldest(of_address)
        if len(self._all) > self.max_connections:
            return self._pop_oldest(self._anonymous)
        return None

    def authenticated(self, connection: ConnectionT, peer: Hashable) -> None:
        """Record that the client has shown a valid key: ``connection`` is no longer evicted."""
        if self._anonymous.get(peer) is connection:
            self._forget_anonymous(peer)

    def remove(self, connection: ConnectionT, peer: Hashable) -> None:
        """Remove a closed connection, unless another protocol has taken its place."""
        if self._all.get(peer) is connection:
            del self._all[peer]
            self._forget_anonymous(peer)

    def _replace(self, connection: ConnectionT, peer: Hashable) -> None:
        self._all[peer] = connection
        if peer in self._anonymous:
            self._anonymous[peer] = self._by_address[address_of(peer)][peer] = connection

    def _pop_oldest(self, among: dict[Hashable, ConnectionT]) -> ConnectionT:
        peer, oldest = next(iter(among.items()))
        self.remove(oldest, peer)
        return oldest

    def _forget_anonymous(self, peer: Hashable) -> None:
        if self._anonymous.pop(peer, None) is None:
            return
        address = address_of(peer)
        of_address = self._by_address[address]
        del of_address[peer]
        if not of_address:
            del self._by_address[address]


def address_of(peer: Hashable) -> bytes:
    """Return the address under which a peer counts: IPv4 address, or /64 network of IPv6.

    One client may use 2**64 IPv6 addresses.
    """
    name = peer[0] if isinstance(peer, tuple) and peer else ""
    if not isinstance(name, str):
        return b""
    if ":" not in name:
        return name.encode()
    if name.startswith(_MAPPED) and "." in name:
        return name[len(_MAPPED) :].encode()
    try:
        return socket.inet_pton(socket.AF_INET6, name.partition("%")[0])[:_IPV6_PREFIX_BYTES]
    except OSError:
        return name.encode()
