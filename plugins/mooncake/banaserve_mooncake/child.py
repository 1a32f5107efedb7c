"""Daemon's side of Mooncake's process, and the memory that both share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import xxhash

from banaserve import _native
from banaserve.base.net.framing import MessageReader
from banaserve.base.platform.linux import SEALS
from banaserve.kvstore.fingerprint import PAGE_BYTES
from banaserve.kvstore.pool import map_memory
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve_mooncake.config import MooncakeConfig
from banaserve_mooncake.process import CONFIG_VARIABLE, ORDERS, REPORTS, Order, Report

_MODULE = "banaserve_mooncake.process"
# The process gets no other variable: whoever reaches Mooncake's port can read all of its memory,
# and the daemon's environment holds keys.
_PASSED_ON = (
    "CUDA_", "FI_", "GLOG_", "HOME", "IBV_", "LANG", "LC_", "LD_", "MC_", "MLX", "MOONCAKE_",
    "PATH", "PYTHON", "RDMAV_", "TMPDIR", "UCX_",
)  # fmt: skip
_SEND_BUFFER_BYTES = 2**20
_RECEIVE_BYTES = 65536
_KEPT_LOG_BYTES = 4096
_EXIT_TIMEOUT_S = 0.5
_FIRST = np.zeros(1, np.int64)
# Trailer after a block's bytes: magic and version, number of the bytes, digest of their XXH3-64 and
# the key.
_TRAILER = struct.Struct("<8sQ16s")
_MAGIC = b"bnsv-mc2"
TRAILER_BYTES = _TRAILER.size


class Staging:
    """Slots of shared memory, each for one block and its trailer.

    Mooncake's process may write to the slots at any time, whether asked to or not. Therefore a
    block is checked after it has been copied out.
    """

    def __init__(self, num_slots: int, max_block_bytes: int) -> None:
        self._slot_bytes = max_block_bytes + PAGE_BYTES
        num_bytes = num_slots * self._slot_bytes
        self.fd = os.memfd_create("banaserve-mooncake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, num_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        self._memory = map_memory(self.fd, num_bytes)
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self) -> int:
        """Take a free slot."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Give back a slot that is no longer read or written."""
        self._free.append(slot)

    def first_byte(self, slot: int) -> int:
        """Return the offset of ``slot``."""
        return slot * self._slot_bytes

    def fill(self, slot: int, key: bytes, block: BlockBytes) -> None:
        """Copy a block and its trailer into ``slot``."""
        start, end = self.first_byte(slot), self.first_byte(slot) + block.size
        checksum = _copy(self._memory[start:end], block, streaming=True)  # another process reads it
        trailer = _TRAILER.pack(_MAGIC, block.size, _named(checksum, key))
        self._memory[end : end + TRAILER_BYTES] = np.frombuffer(trailer, np.uint8)

    def copy_out(self, slot: int, key: bytes, target: BlockBytes) -> bool:
        """Copy a block of the target's size to ``target``; return whether its trailer is right."""
        start, end = self.first_byte(slot), self.first_byte(slot) + target.size
        trailer = self._memory[end : end + TRAILER_BYTES].tobytes()
        checksum = _copy(target, self._memory[start:end], streaming=False)
        return trailer == _TRAILER.pack(_MAGIC, target.size, _named(checksum, key))

    def close(self) -> None:
        """Release the memory."""
        del self._memory
        os.close(self.fd)


class MooncakeChild:
    """Process of Mooncake's client, from one start to its end.

    No method waits for the process, except ``end`` and ``exit_reason`` for a moment.

    Attributes:
        is_ready: True once the process has joined the store.
        last_line: Last line that the process wrote to its log.
    """

    def __init__(self, config: MooncakeConfig, staging_fd: int) -> None:
        """Start the process.

        Raises:
            OSError: The process cannot be started.
        """
        self.is_ready = False
        self.last_line = ""
        self._reader = MessageReader(REPORTS)
        self.sock, theirs = socket.socketpair()
        self.log_fd, log_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        command = [sys.executable, "-m", _MODULE, "--socket-fd", str(theirs.fileno())]
        command += ["--staging-fd", str(staging_fd)]
        environment = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
        # Not an argument, which every user sees: a URL may hold a password.
        environment[CONFIG_VARIABLE] = msgspec.json.encode(config).decode()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_end,
                stderr=log_end,
                env=environment,
                pass_fds=(theirs.fileno(), staging_fd),
            )
        except OSError:
            self._close_fds()
            raise
        finally:
            theirs.close()
            os.close(log_end)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.sock.setblocking(False)

    def send(self, order: Order) -> None:
        """Send an order to the process.

        Raises:
            OSError: The process is gone or does not read.
        """
        data = ORDERS.encode(order)
        if self.sock.send(data) < len(data):
            raise ConnectionAbortedError("it does not read")

    def receive(self) -> Iterator[Report]:
        """Yield the reports of the process.

        Raises:
            EOFError: The process has closed its socket.
            OSError: The process is gone.
            ProtocolError: The bytes are not valid reports.
        """
        with contextlib.suppress(BlockingIOError):
            data = self.sock.recv(_RECEIVE_BYTES)
            if not data:
                raise EOFError
            self._reader.feed(data)
            while (report := self._reader.take()) is not None:
                yield report

    def read_log(self) -> bool:
        """Read some output of the process; return False if there is none, at least for now."""
        try:
            data = os.read(self.log_fd, _KEPT_LOG_BYTES)
        except BlockingIOError:
            return False
        lines = data.decode(errors="replace").strip().splitlines()
        self.last_line = lines[-1] if lines else self.last_line
        return bool(data)

    def end(self, grace_s: float = 0.0) -> None:
        """Kill the process unless it ends within ``grace_s``; then it touches no memory."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close_fds()

    def exit_reason(self) -> str:
        """Describe why the process has ended, once its socket is closed."""
        try:
            code = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it hangs"
        while self.read_log():
            pass
        status = f"signal {-code}" if code < 0 else f"exit code {code}"
        # After the process has joined, its last line is about an earlier problem.
        return status if self.is_ready or not self.last_line else f"{status}: {self.last_line}"

    def _close_fds(self) -> None:
        self.sock.close()
        os.close(self.log_fd)


def _copy(target: BlockBytes, source: BlockBytes, *, streaming: bool) -> int:
    """Copy bytes; return the XXH3-64 of the bytes that ``target`` then holds."""
    return _native.copy_regions_checksummed(
        target.ctypes.data, source.ctypes.data, _FIRST, _FIRST, target.size, target.size,
        source.size, streaming=streaming,
    )  # fmt: skip


def _named(checksum: int, key: bytes) -> bytes:
    # With the key in the digest, a block stored under another block's name is detected too.
    return xxhash.xxh3_128_digest(checksum.to_bytes(8, "little") + key)
