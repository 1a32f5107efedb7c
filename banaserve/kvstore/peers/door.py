"""Door of a store for its peers: whoever proves that he knows the key may fetch blocks."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from typing import Protocol

from banaserve.errors import BanaServeError, ProtocolError, UserError
from banaserve.kvstore.interface import Lookup
from banaserve.kvstore.peers.messages import (
    VERSION,
    AskBlocks,
    BlockMissing,
    BlockSent,
    BlockStates,
    FetchBlock,
    PeerHello,
    PeerRequest,
    PeerWelcome,
    message_of,
    request_in,
)
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve.net.keep_alive import keep_alive
from banaserve.transport.channel import StreamChannel
from banaserve.transport.connect import over_tcp
from banaserve.transport.interface import Message
from banaserve.transport.service import GREETING_S, Service

log = logging.getLogger(__name__)

SILENT_S = 30.0
"""A peer asks at least once a second; one that says nothing for so long is gone."""
SEND_S = 30.0
_BACKLOG = 64


class BlockSource(Protocol):
    """Blocks that may be given away. Any thread may call; both raise where the store is busy."""

    def states(self, keys: Sequence[bytes]) -> list[Lookup]:
        """What is known of each key."""
        ...

    def lent(self, key: bytes, num_bytes: int) -> AbstractContextManager[BlockBytes | None]:
        """The bytes of a block, which stay while the context lasts; None where it is not there."""
        ...


class PeerDoor:
    """Serves blocks to peers until ``close``.

    Args:
        host: Address to listen on.
        port: 0 takes a free one.
        key: What peers have to know.
        source: Of the blocks.

    Raises:
        UserError: The address cannot be had.
    """

    def __init__(self, host: str, port: int, key: bytes, source: BlockSource) -> None:
        self._key = key
        self._source = source
        listener = _listen(host, port)
        keep_alive(listener)
        self.port: int = listener.getsockname()[1]
        self._service = Service("store-peers", listener, self._serve)

    def close(self) -> None:
        """End every connection and stop listening."""
        self._service.close()

    def _serve(self, sock: socket.socket) -> None:
        name = _name_of(sock)
        try:
            deadline = time.monotonic() + GREETING_S
            channel = over_tcp(sock, self._key, deadline, listening=True)
        except BanaServeError as error:
            log.warning("turned away %s: %s", name, error)
            return
        with closing(channel):
            try:
                while True:
                    self._answer(channel, channel.receive(SILENT_S))
            except ProtocolError as error:
                log.warning("closed the connection to %s: %s", name, error)

    def _answer(self, channel: StreamChannel, message: Message) -> None:
        request: PeerRequest = request_in(message)
        match request:
            case PeerHello(version):
                # Whoever speaks another version hears which one is spoken here, and leaves.
                channel.reply(message, message_of(PeerWelcome(VERSION)), SEND_S)
                if version != VERSION:
                    raise ProtocolError(f"it speaks version {version}, this store {VERSION}")
            case AskBlocks(keys):
                states = self._source.states(keys) if keys else []
                channel.reply(message, message_of(BlockStates(bytes(states))), SEND_S)
            case FetchBlock(key, num_bytes):
                with self._source.lent(key, num_bytes) as block:
                    said = BlockMissing() if block is None else BlockSent()
                    channel.reply(message, message_of(said, block), SEND_S)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UserError(f"--kv-store-listen {host}:{port}: {error.strerror or error}") from error


def _name_of(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "a peer that has left"
    return f"{host}:{port}"
