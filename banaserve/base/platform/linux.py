"""Linux calls that the standard library does not wrap, or wraps without releasing the GIL."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

MAX_SOCKET_PATH_BYTES = 107
MADV_DONTNEED = 4
MADV_REMOVE = 9
MADV_POPULATE_WRITE = 23
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of a shared memory file: otherwise one side could shrink it and kill others by SIGBUS."""
_M_ARENA_MAX = -8
_POPULATE_STEP_BYTES = 64 * 2**20
_SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("iII")
_TCP_INFO = struct.Struct("8B12I")
_LAST_DATA_RECEIVED_MS = 19
"""Index in ``struct tcp_info``, after eight bytes and eleven numbers."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def madvise(address: int, num_bytes: int, advice: int) -> None:
    """Call ``madvise(2)``, without the GIL.

    Raises:
        OSError: The kernel refused the advice.
    """
    if _libc.madvise(address, num_bytes, advice):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def limit_heaps(count: int) -> bool:
    """Limit malloc to ``count`` heaps, shared by threads; return False if malloc is not glibc's.

    Without a limit each new thread gets its own heap, up to eight per core, and the memory that a
    thread leaves in its heap is hardly reused.
    """
    mallopt = getattr(_libc, "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, count) == 1


def give_back_heaps() -> None:
    """Return free memory in malloc's heaps to the system, if malloc is glibc's."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def populate(address: int, num_bytes: int) -> bool:
    """Make every page of a range present and mapped for writing, without changing its bytes.

    Args:
        address: Address of a page.
        num_bytes: Length of the range, which may end within its last page.

    Returns:
        False if the kernel does not support it: Linux before 5.14.

    Raises:
        OSError: There is not enough memory.
    """
    try:
        for first_byte in range(0, num_bytes, _POPULATE_STEP_BYTES):
            length = min(_POPULATE_STEP_BYTES, num_bytes - first_byte)
            madvise(address + first_byte, length, MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


class Credentials(NamedTuple):
    """Process at the other end of a Unix socket when it connected or began to listen."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Credentials:
    """Return the credentials of the peer's process, as verified by the kernel."""
    size = _CREDENTIALS.size
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return Credentials(pid, uid)


def is_own(peer: Credentials) -> bool:
    """Return whether a peer is run by this process's user, or by root."""
    return peer.uid in (os.geteuid(), 0)


def since_received_s(sock: socket.socket) -> float:
    """Return the seconds since a TCP connection last received bytes.

    Raises:
        OSError: The socket is no TCP connection, or is closed.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    return float(_TCP_INFO.unpack(info)[_LAST_DATA_RECEIVED_MS]) / 1000.0


def open_peer_pidfd(sock: socket.socket) -> int:
    """Return a pidfd of the peer's process, which becomes readable when that process has died.

    Closing of the socket is no reliable sign: a process that the peer has forked may hold it open.
    ``SO_PEERPIDFD`` (Linux 6.5) also works for a process of another PID namespace, and cannot meet
    a reused pid; on older kernels ``pidfd_open`` is used.

    Raises:
        OSError: The process has already died, or is not visible from this namespace.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return os.pidfd_open(peer_of(sock).pid)


def visible_gpus() -> list[str]:
    """Return the names of this process's GPUs, as in CUDA_VISIBLE_DEVICES; asks no driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    found = Path("/dev").glob("nvidia[0-9]*")
    return sorted((one.name.removeprefix("nvidia") for one in found), key=int)


_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Entries of a control group's ``memory.stat``, in bytes; a file in /dev/shm is in none of them."""
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(group: Path = _CONTROL_GROUP) -> int:
    """Return the memory available without swapping, within the limit of control group ``group``.

    A group's use includes cached files, which stay in memory until it is needed: they count as
    available.
    """
    available_bytes = _meminfo_bytes("MemAvailable")
    try:
        limit = (group / "memory.max").read_text().strip()
        used_bytes = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return available_bytes
    if limit == "max":
        return available_bytes
    reclaimable_bytes = sum(int(stat.get(name, 0)) for name in _RECLAIMABLE)
    return min(available_bytes, int(limit) - used_bytes + reclaimable_bytes)


def _meminfo_bytes(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        field, _, value = line.partition(":")
        if field == name:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/meminfo does not name {name}")
