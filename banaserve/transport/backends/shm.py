"""Shared memory on one machine: a copy is a memcpy without calls in the other side's code."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from banaserve.base.platform.linux import is_own, peer_of
from banaserve.transport.channels.stream import SocketStream
from banaserve.transport.errors import PeerGoneError, RefusedError, TransferTimeoutError
from banaserve.transport.interface import REGION_ID_BYTES, Transport
from banaserve.transport.memory import SLICE_BYTES
from banaserve.transport.regions.descriptor import RegionDescriptor
from banaserve.transport.regions.remote_region import RemoteRegion, Ticket
from banaserve.transport.regions.shared_file import SharedFile, new_file
from banaserve.transport.threaded_server import GREETING_S, listen_unix

NAME = "shm"
_SLICE_BYTES = 4 * SLICE_BYTES
"""Size of a slice. It is large, because each slice takes the GIL about five times, in competition
with an engine in the same process."""


class ShmTransport(Transport):
    """Transport that passes memory files over a Unix socket to processes of this user only."""

    name = NAME

    def close(self) -> None:
        super().close()
        if self._address:
            Path(self._address).unlink(missing_ok=True)

    def _listen(self) -> tuple[socket.socket, str]:
        listener, path = listen_unix(self._options.folder, self.name)
        return listener, str(path)

    def _reserve(self, num_bytes: int, epoch: int) -> SharedFile:
        fd = new_file(num_bytes, epoch)
        try:
            return SharedFile(fd, num_bytes)
        except OSError as error:
            os.close(fd)
            raise RefusedError(f"cannot map {num_bytes} bytes: {error.strerror}") from None

    def _connect(self, descriptor: RegionDescriptor, timeout_s: float) -> ShmRemote:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            fd = _ask_for_file(sock, descriptor)
            try:
                file = self._take(fd, descriptor)
            except BaseException:
                os.close(fd)
                raise
            return ShmRemote(descriptor, self.forget_opened, file, SocketStream(sock))
        except TimeoutError:
            sock.close()
            raise TransferTimeoutError(
                f"the peer has not answered within {timeout_s:g} s"
            ) from None
        except (OSError, ValueError) as error:
            sock.close()
            raise PeerGoneError(f"nobody offers the region: {error}") from error
        except BaseException:
            sock.close()
            raise

    def _take(self, fd: int, descriptor: RegionDescriptor) -> SharedFile:
        """Return a peer's file, if it is one of a region."""
        return SharedFile(fd, descriptor.num_bytes)

    def _serve(self, sock: socket.socket) -> None:
        if not is_own(peer_of(sock)):
            return
        sock.settimeout(GREETING_S)
        region_id = sock.recv(REGION_ID_BYTES, socket.MSG_WAITALL)
        with self._lock:
            offer = self._offered.get(region_id)
            # Under the lock: a region that is closed meanwhile closes its descriptor.
            fd = offer.store.reopen() if offer and isinstance(offer.store, SharedFile) else -1
        if fd < 0:
            sock.sendall(b"n")
            return
        try:
            socket.send_fds(sock, [b"y"], [fd])
        finally:
            os.close(fd)
        # Kept open until the peer closes: its end shows the peer that this process is gone.
        sock.settimeout(None)
        sock.recv(1)


class ShmRemote(RemoteRegion):
    """Memory file of a peer, mapped in this process."""

    never_waits_for_peer = True

    def __init__(
        self,
        descriptor: RegionDescriptor,
        forget: Callable[[RemoteRegion], bool],
        file: SharedFile,
        stream: SocketStream,
    ) -> None:
        self._file = file
        self._stream = stream
        super().__init__(descriptor, forget)

    def warm(self, first_byte: int, num_bytes: int) -> None:
        super().warm(first_byte, num_bytes)
        self._file.populate(first_byte, num_bytes)

    def _disconnect(self) -> None:
        self._stream.close()
        self._file.close()

    def _carry_out(self, ticket: Ticket) -> None:
        for part in ticket.plan.slices(_SLICE_BYTES):
            ticket.check()
            self._check_peer()
            with self._file.use(part.epoch):
                self._file.copy(part)
        # A write into the memory of a dead process is not a completed write.
        self._check_peer()

    def _check_peer(self) -> None:
        self._stream.check_peer()
        if self._stream.num_buffered():
            raise PeerGoneError("the peer breaks the protocol: nothing follows the file")


def _ask_for_file(sock: socket.socket, descriptor: RegionDescriptor) -> int:
    sock.connect(descriptor.address)
    if not is_own(peer_of(sock)):
        raise RefusedError(f"{descriptor.address} is run by another user")
    sock.sendall(descriptor.region_id)
    answer, fds, _, _ = socket.recv_fds(sock, 1, 1)
    if not answer:
        raise PeerGoneError("the peer has closed the connection")
    if not fds:
        raise RefusedError("the peer does not offer this region any more")
    return fds[0]
