"""Event loop of the store: one thread over sockets and client processes."""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from banaserve.base.errors import ProtocolError, UserError
from banaserve.base.net.addresses import host_and_port
from banaserve.base.platform.fail_points import FailPoint, reach
from banaserve.base.platform.linux import is_own, open_peer_pidfd, peer_of
from banaserve.kvstore import wire
from banaserve.kvstore.daemon.carved_pool import CarvedPool
from banaserve.kvstore.daemon.connections.listener import (
    Connection,
    Quarantine,
    StoreListener,
    make_way,
)
from banaserve.kvstore.daemon.connections.peer_server import PeerServer, PoolAccess
from banaserve.kvstore.daemon.options import DaemonOptions
from banaserve.kvstore.daemon.pushes.pushing import Pushing
from banaserve.kvstore.daemon.service import StoreService
from banaserve.kvstore.daemon.tiering.attached_tier import AttachedTier, attach
from banaserve.kvstore.daemon.tiering.tiering import NOTE_EVERY_S, Tiering
from banaserve.kvstore.peers.tier import PeersTier
from banaserve.kvstore.pool import Board, SlotPool
from banaserve.kvstore.sizes import format_size, parse_size
from banaserve.kvstore.tiers.registry import SSD, distributed_tier

log = logging.getLogger(__name__)

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
MAX_CONNECTIONS = 1024
DRAIN_S = 3.0
"""Maximum time to write blocks to tiers at the end, in seconds."""
CLOSE_TIERS_S = 2.0


class StoreServer:
    """Server of one pool on one socket. ``run`` blocks; ``stop`` may be called from any thread."""

    def __init__(self, options: DaemonOptions) -> None:
        """Allocate the memory and listen; clients that connect are served once ``run`` runs.

        Raises:
            UserError: The socket or the memory is not available; one line says why.
        """
        self._socket_path = options.socket_path
        make_way(options.socket_path)
        self._pool = SlotPool(options.pool_bytes)
        self._board = Board(self._pool.num_bytes)
        self._selector = selectors.DefaultSelector()
        carved = CarvedPool(
            self._pool,
            self._board,
            tenant_quota=options.tenant_quota,
            kept_quota=options.kept_quota,
            poisons=options.poison_free_slots,
            verifies=options.verify_memory,
        )
        self._peers = PeersTier(options.peers.secret) if options.peers.is_used else None
        self._tiering = Tiering(_attached_tiers(options, self._peers), carved, self._selector)
        self._pushing = Pushing(options.peers.secret, self._selector, carved)
        if self._peers is not None:
            self._set_peers(options.peers.peers)
        self._service = StoreService(carved, self._tiering, self._pushing, self._set_peers)
        self._quarantine = Quarantine(self._selector, self._service.drop)
        # Listen only now: filling the memory and reading the tiers' indexes take long, and a client
        # that connects is to be answered at once.
        self._peer_server: PeerServer | None = None
        try:
            if options.peers.listen:
                host, port = host_and_port("address for peers", options.peers.listen)
                access = PoolAccess(self._service, self._selector)
                self._peer_server = PeerServer(host, port, options.peers.secret, access)
            self._listener = StoreListener(options.socket_path)
        except BaseException:
            self._close_peers()
            self._tiering.close(CLOSE_TIERS_S)
            raise
        self._connections: dict[int, Connection] = {}
        self._last_connection_id = 0
        self._stopping = False
        self._spare_fd = _open_spare()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, READ, lambda _: self._wake_reader.recv(4096))
        self._selector.register(self._listener.sock, READ, self._on_accept)
        # A pidfd rather than PR_SET_PDEATHSIG, which fires when the parent's thread ends.
        self._parent_pidfd = os.pidfd_open(os.getppid()) if options.die_with_parent else None
        if self._parent_pidfd is not None:
            self._selector.register(self._parent_pidfd, READ, self._on_parent_death)

    @property
    def wake_fd(self) -> int:
        """File descriptor for ``signal.set_wakeup_fd``: a signal must end the wait for events."""
        return self._wake_writer.fileno()

    def run(self) -> None:
        """Serve until ``stop``."""
        size = format_size(self._pool.num_bytes)
        log.info("store of %s on %s", size, self._socket_path)
        timeout_s = NOTE_EVERY_S if self._tiering.tiers else None
        while not self._stopping:
            for key, events in self._selector.select(timeout_s):
                key.data(events)
            self._tiering.pump()
            self._pushing.look()

    def stop(self) -> None:
        """Make ``run`` return soon. Safe from any thread and from signal handlers."""
        self._stopping = True
        with suppress(OSError):
            self._wake_writer.send(b"\0")

    def close(self) -> None:
        """Close every connection, write the remaining blocks to tiers, and free the memory.

        This blocks for ``DRAIN_S`` and a few seconds more at most.
        """
        self._listener.close()
        self._close_peers()
        self._quarantine.close()
        for connection in self._connections.values():
            connection.close()
            os.close(connection.pidfd)
        if self._parent_pidfd is not None:
            os.close(self._parent_pidfd)
        if not self._tiering.drain(DRAIN_S):
            log.warning("%d blocks were not written to tiers in time", self._tiering.num_pending)
        self._tiering.close(CLOSE_TIERS_S)
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
        self._pool.close()
        self._board.close()

    def _close_peers(self) -> None:
        if self._peer_server is not None:
            self._peer_server.close()
        self._pushing.close()

    def _set_peers(self, peers: Sequence[str]) -> None:
        """Fetch blocks from these stores and push to them from now on, and no others."""
        if self._peers is None:
            raise UserError(
                "this store shares blocks with no other: it was started without a key of peers"
            )
        addresses = [host_and_port("peer", peer) for peer in peers]
        try:
            self._peers.set_addresses(addresses)
            self._pushing.set_peers(addresses)
        except RuntimeError as error:  # the process or its container has no more threads
            raise UserError(f"not all of its peers are set: {error}") from None

    def _on_parent_death(self, _events: int) -> None:
        log.info("stopping: the process that started the store is gone")
        self._stopping = True

    def _on_accept(self, _events: int) -> None:
        try:
            sock, _ = self._listener.sock.accept()
        except OSError as error:
            self._turn_away(error)
            return
        reason, pidfd = self._examine(sock)
        if pidfd is None:
            log.error("turned away process %d: %s", peer_of(sock).pid, reason)
            sock.close()
            return
        self._last_connection_id += 1
        connection = Connection(self._last_connection_id, sock, pidfd)
        self._connections[connection.id] = connection
        self._selector.register(sock, READ, lambda events: self._on_ready(connection, events))
        # A socket that a forked child inherited stays open when its process dies.
        self._selector.register(pidfd, READ, lambda _: self._on_death(connection))

    def _turn_away(self, error: OSError) -> None:
        """Close the waiting connection, which would otherwise wake the loop for ever."""
        log.error("cannot accept a connection: %s", error.strerror)
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
        with suppress(OSError):
            self._listener.sock.accept()[0].close()
        self._spare_fd = _open_spare()

    def _examine(self, sock: socket.socket) -> tuple[str, int | None]:
        """Return a pidfd of the peer, or the reason why the peer is not served."""
        peer = peer_of(sock)
        if not is_own(peer):
            return f"it belongs to user {peer.uid}", None
        # Sessions in quarantine count too: each holds file descriptors like a connection.
        if len(self._connections) + len(self._quarantine) >= MAX_CONNECTIONS:
            return f"{MAX_CONNECTIONS} connections are open", None
        try:
            return "", open_peer_pidfd(sock)
        except OSError as error:
            return f"its process cannot be watched ({error.strerror})", None

    def _on_ready(self, connection: Connection, events: int) -> None:
        if connection.closed:
            return
        try:
            if events & WRITE:
                connection.flush()
            if events & READ:
                self._on_readable(connection)
        except (EOFError, OSError):
            self._disconnect(connection)
        except ProtocolError as error:
            self._service.num_protocol_errors += 1
            log.error("closed connection %d: %s", connection.id, error)
            self._disconnect(connection)
        if not connection.closed and connection.wanted_events != connection.awaited_events:
            connection.awaited_events = connection.wanted_events
            callback = self._selector.get_key(connection.sock).data
            self._selector.modify(connection.sock, connection.awaited_events, callback)

    def _on_readable(self, connection: Connection) -> None:
        for request in connection.receive():
            match request:
                case wire.ClientHello():
                    self._greet(connection, request)
                case wire.Goodbye():
                    self._service.drop(connection.id)
                    raise EOFError
                case _:
                    reply = self._service.answer(connection.id, request)
                    if reply is not None:
                        reach(FailPoint.STORE_BEFORE_REPLY)
                        connection.send(reply)

    def _greet(self, connection: Connection, hello: wire.ClientHello) -> None:
        reply = self._service.greet(connection.id, hello)
        if isinstance(reply, wire.ClientRefused):
            connection.send(reply)
            raise EOFError
        shared = (self._pool.fd, self._board.fd)
        connection.send(reply, () if hello.fingerprint is None else shared)

    def _on_death(self, connection: Connection) -> None:
        if not connection.closed:
            self._disconnect(connection)

    def _disconnect(self, connection: Connection) -> None:
        del self._connections[connection.id]
        self._selector.unregister(connection.sock)
        self._selector.unregister(connection.pidfd)
        connection.close()
        client_name = self._service.leave(connection.id)
        if client_name is None:
            os.close(connection.pidfd)
            return
        pidfds = [connection.pidfd]
        try:
            for session_id in self._service.sessions_named(client_name):
                pidfds.append(os.dup(self._connections[session_id].pidfd))
        except OSError as error:
            # Without a watch on all of its processes, its slots are never given to others.
            log.error("the slots of %s stay in use: %s", client_name, error.strerror)
            while pidfds:
                os.close(pidfds.pop())
        self._quarantine.hold(connection.id, pidfds)


def _open_spare() -> int:
    """Open a file descriptor to close when no other is left; -1 if it cannot be opened."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _attached_tiers(options: DaemonOptions, peers: PeersTier | None) -> list[AttachedTier]:
    """Return the tiers, fastest first: local disk, memory of other machines, shared storage."""
    found = []
    if (folder := options.ssd) is not None:
        # Imported only here: most stores have no such tier.
        from banaserve.kvstore.tiers.ssd.tier import SsdTier

        num_bytes = parse_size(options.ssd_size)
        found.append(attach(SSD, lambda: SsdTier(folder, num_bytes)))
    if peers is not None:
        found.append(AttachedTier(peers.name, peers, takes_blocks=False))
    if url := options.distributed:
        found.append(attach(urlsplit(url).scheme, lambda: distributed_tier(url).from_url(url)))
    return found
