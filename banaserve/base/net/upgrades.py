"""Requests that offer another protocol, such as HTTP/2: the offer is ignored (RFC 9110, 7.8)."""

from __future__ import annotations

from typing import Protocol


class _Connection(Protocol):
    def on_body(self, body: bytes, /) -> None: ...

    def on_message_complete(self) -> None: ...


class BodyOfUpgrade:
    """Callbacks of a second parser, for the body of the last request of ``connection``.

    After a head with an offer httptools' parser takes all bytes for the other protocol's. Java's
    client offers HTTP/2 with the first request of each connection.
    """

    def __init__(self, connection: _Connection) -> None:
        self._connection: _Connection | None = connection

    def on_body(self, body: bytes) -> None:
        if self._connection is not None:
            self._connection.on_body(body)

    def on_message_complete(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.on_message_complete()
