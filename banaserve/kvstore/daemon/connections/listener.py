"""Unix socket of the daemon: its private listener, connections of clients, and lost ones.

Only the socket file of a dead daemon is replaced. No call on a connection blocks.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from banaserve.base.errors import ProtocolError, UserError
from banaserve.base.net.framing import MessageReader
from banaserve.base.platform.linux import MAX_SOCKET_PATH_BYTES
from banaserve.kvstore import wire

LOCK_WAIT_S = 5.0
"""Maximum wait for the lock, in seconds; a starting store holds it for a second at most."""
_LOCK_POLL_S = 0.01
_BACKLOG = 128
_RECEIVE_BYTES = 64 * 1024
_MAX_UNSENT_BYTES = 2 * wire.MAX_MESSAGE_BYTES


class StoreListener:
    """Listener on ``path`` with mode 0600 until ``close``, which removes the socket file.

    Raises:
        UserError: The path cannot be used; one line says why.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _free_place(path):
                # The file takes its mode from the socket, so that at no time other users can
                # connect.
                os.fchmod(self.sock.fileno(), 0o600)
                self.sock.bind(str(path))
                self.sock.listen(_BACKLOG)
                self._inode = path.stat().st_ino
        except UserError:
            self.sock.close()
            raise
        self.sock.setblocking(False)

    def close(self) -> None:
        """Stop listening and remove the socket file if it is still this listener's."""
        self.sock.close()
        with suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()


def make_way(path: Path) -> None:
    """Remove the socket file of a dead daemon, so that clients are refused at once.

    Raises:
        UserError: ``path`` cannot be listened on; one line says why.
    """
    with _free_place(path):
        return


@contextmanager
def _free_place(path: Path) -> Iterator[None]:
    """Lock the folder of a new socket, and remove the socket file of a dead daemon."""
    check_socket_path(path)
    try:
        with _locked_folder(path.parent):
            _remove_if_stale(path)
            yield
    except OSError as error:
        raise UserError(f"cannot listen on {path}: {error.strerror}") from error


def check_socket_path(path: Path) -> None:
    """Check that the kernel allows a Unix socket of this path."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise UserError(
            f"socket path {path} has {num_bytes} bytes and at most {MAX_SOCKET_PATH_BYTES} are "
            "possible: choose a shorter one"
        )


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Lock the folder: two daemons that start at once could remove each other's socket as stale."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        raise UserError(f"folder {folder} of the store's socket does not exist") from None
    try:
        _lock(fd, folder)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, folder: Path) -> None:
    # Any user who may read a folder can hold a lock on it indefinitely.
    deadline_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise UserError(
                    f"another process holds a lock on {folder}: choose a socket in another folder"
                ) from None
            time.sleep(_LOCK_POLL_S)


def _remove_if_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UserError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except TimeoutError:
            pass
    raise UserError(f"another process listens on {path}: stop it or choose another socket")


class Connection:
    """Connected socket with its partly received messages and its unsent replies.

    Attributes:
        id: Number of the connection, never reused within one daemon.
        pidfd: Pidfd of the client's process. ``close`` leaves it open.
        awaited_events: Events for which the selector waits on the socket.
        closed: True after ``close``: pending events of this connection must be ignored.
    """

    def __init__(self, connection_id: int, sock: socket.socket, pidfd: int) -> None:
        sock.setblocking(False)
        self.id = connection_id
        self.sock = sock
        self.pidfd = pidfd
        self.awaited_events = selectors.EVENT_READ
        self.closed = False
        self._reader = MessageReader(wire.REQUESTS)
        self._unsent = bytearray()

    @property
    def wanted_events(self) -> int:
        """Events to wait for: until a client reads its replies, its next requests are not read."""
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def receive(self) -> Iterator[wire.Request]:
        """Yield the messages that have arrived.

        Raises:
            EOFError: The client has closed its end.
            OSError: The connection is broken.
            ProtocolError: The bytes are not valid messages.
        """
        try:
            data = self.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        self._reader.feed(data)
        while (request := self._reader.take()) is not None:
            yield request

    def send(self, reply: wire.Reply, fds: Sequence[int] = ()) -> None:
        """Send or queue a reply, with copies of ``fds`` attached to its first byte.

        Raises:
            OSError: The connection is broken.
            ProtocolError: The client does not read its replies.
        """
        frame = wire.REPLIES.encode(reply)
        num_sent = 0
        if not self._unsent:
            try:
                if fds:
                    num_sent = socket.send_fds(self.sock, [frame], fds)
                else:
                    num_sent = self.sock.send(frame)
            except BlockingIOError:
                if fds:
                    raise
        elif fds:
            raise ProtocolError("a Hello after other requests")
        self._unsent += frame[num_sent:]
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            raise ProtocolError(f"{len(self._unsent)} bytes of replies were not read")

    def flush(self) -> None:
        """Send as many unsent bytes as the socket accepts now; raise OSError if that fails."""
        del self._unsent[: self.sock.send(self._unsent)]

    def close(self) -> None:
        """Close the socket."""
        self.closed = True
        self.sock.close()


class Quarantine:
    """Watch over the processes of lost connections; ``on_over`` gets a session after their end.

    A connection can end while its process, or another process of the same client, is still copying
    into the slots that it had reserved. Those slots are given to no other client before every
    such process is dead.
    """

    def __init__(self, selector: selectors.BaseSelector, on_over: Callable[[int], None]) -> None:
        self._selector = selector
        self._on_over = on_over
        self._alive: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._alive)

    def hold(self, session_id: int, pidfds: Sequence[int]) -> None:
        """Wait for all of ``pidfds``, which belong to the quarantine from now on."""
        self._alive[session_id] = set(pidfds)
        for pidfd in pidfds:
            self._selector.register(
                pidfd,
                selectors.EVENT_READ,
                lambda _, pidfd=pidfd: self._on_death(session_id, pidfd),
            )

    def close(self) -> None:
        """Stop waiting."""
        for pidfds in self._alive.values():
            for pidfd in pidfds:
                self._forget(pidfd)
        self._alive.clear()

    def _on_death(self, session_id: int, pidfd: int) -> None:
        self._forget(pidfd)
        alive = self._alive[session_id]
        alive.remove(pidfd)
        if not alive:
            del self._alive[session_id]
            self._on_over(session_id)

    def _forget(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
