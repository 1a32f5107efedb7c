"""Mooncake's client in a separate process.

Setting up and closing the client hold the GIL for seconds, and its TCP transport reads and writes
any address that a peer names. Therefore neither the daemon nor its pool share a process with the
client: they share only the staging memory, whose bytes are checked after they were copied out.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import signal
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import Any

import msgspec

from banaserve.base.net.framing import Framing, MessageReader, receive
from banaserve_mooncake.config import MooncakeConfig

CONFIG_VARIABLE = "BANASERVE_MOONCAKE_CONFIG"
KEY_PREFIX = "banaserve-"
NOT_FOUND = -704
TOO_LARGE = -600
"""Code for an object that is longer than the buffer."""
BROKEN_CALL = -1
_LOCAL_BUFFER_BYTES = 2**20
_NUM_CONTROL_THREADS = 2
_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE_BYTES = 16 * 2**20


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class AskPresent(_Message, frozen=True, tag="ask"):
    """Question about keys, answered for each with 1 if present, 0 if not, or an error code."""

    seq: int
    keys: list[bytes]


class Remove(_Message, frozen=True, tag="remove"):
    seq: int
    keys: list[bytes]


class Put(_Message, frozen=True, tag="put"):
    """Store of a block from the staging memory; answered with 0 or an error code."""

    seq: int
    key: bytes
    first_byte: int
    num_bytes: int


class Get(_Message, frozen=True, tag="get"):
    """Load of a block into the staging memory; answered with its length or an error code."""

    seq: int
    key: bytes
    first_byte: int
    num_bytes: int


class Leave(_Message, frozen=True, tag="leave"):
    """Order to unmount the segment, so that the master forgets its blocks at once, and to end."""


class ProcessReady(_Message, frozen=True, tag="ready"):
    """First message of the process if it has joined the store."""


class OperationRefused(_Message, frozen=True, tag="refused"):
    """First message of the process if it could not join the store; the process ends after it."""

    reason: str


class OperationDone(_Message, frozen=True, tag="done"):
    seq: int
    codes: list[int]


Call = AskPresent | Remove | Put | Get
Order = Call | Leave
Report = ProcessReady | OperationRefused | OperationDone
ORDERS: Framing[Order] = Framing(Order, _MAX_MESSAGE_BYTES)
REPORTS: Framing[Report] = Framing(Report, _MAX_MESSAGE_BYTES)


def main(argv: Sequence[str] | None = None) -> None:
    """Join the store, execute the orders from the socket, and leave when they end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--staging-fd", type=int, required=True)
    given = parser.parse_args(argv)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C reaches the whole process group, but only the daemon decides when this process leaves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(os.environ[CONFIG_VARIABLE], type=MooncakeConfig)
    sock = socket.socket(fileno=given.socket_fd)
    staging = mmap.mmap(given.staging_fd, 0)
    try:
        store, replication = _join(config, staging)
    except Exception as error:
        sock.sendall(REPORTS.encode(OperationRefused(str(error))))
        os._exit(1)
    sock.sendall(REPORTS.encode(ProcessReady()))
    _Servant(store, replication, staging, sock, config.depth).serve()
    store.close()
    # Not through the interpreter's normal exit, which waits for calls that hang.
    os._exit(0)


def _join(config: MooncakeConfig, staging: mmap.mmap) -> tuple[Any, Any]:
    timeout_s = ceil(config.timeout_s)
    environment = {
        "MC_RPC_TIMEOUT_MS": str(1000 * timeout_s),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(1000 * timeout_s),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(timeout_s),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(timeout_s),
        "MC_STORE_CLIENT_METRIC": "0",
        "MC_LOG_LEVEL": "ERROR",
    }
    # The library reads these variables when it is loaded.
    os.environ.update({k: v for k, v in environment.items() if k not in os.environ})
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    store = MooncakeDistributedStore()
    code = store.setup(
        local_hostname=config.host or _own_address(config.master),
        metadata_server=config.metadata,
        global_segment_size=config.segment_bytes,
        local_buffer_size=_LOCAL_BUFFER_BYTES,
        protocol=config.protocol,
        rdma_devices=config.devices,
        master_server_addr=config.master,
    )
    if code:
        raise RuntimeError(f"mooncake_master at {config.master} cannot be joined (code {code})")
    code = store.register_buffer(_address(staging), len(staging))
    if code:
        raise RuntimeError(f"Mooncake cannot register memory (code {code})")
    replication = ReplicateConfig()
    if config.segment_bytes:
        # A store into memory of this machine uses no network; other machines fetch the block.
        replication.preferred_segment = store.get_hostname()
    return store, replication


def _own_address(master: str) -> str:
    """Return the address from which this machine reaches the master; sends nothing."""
    host, _, port = master.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _name(key: bytes) -> str:
    return KEY_PREFIX + key.hex()


class _Servant:
    """Executor of each call in a thread, so that a call that hangs does not delay the others."""

    def __init__(
        self, store: Any, replication: Any, staging: mmap.mmap, sock: socket.socket, depth: int
    ) -> None:
        self._store = store
        self._replication = replication
        self._base = _address(staging)
        self._sock = sock
        self._lock = threading.Lock()
        self._transfers = ThreadPoolExecutor(depth, "transfer")
        # Questions to the master must not queue behind transfers from a peer that hangs.
        self._control = ThreadPoolExecutor(_NUM_CONTROL_THREADS, "control")

    def serve(self) -> None:
        """Serve until the daemon sends Leave or is gone."""
        reader = MessageReader(ORDERS)
        while (order := receive(lambda _: self._sock.recv(65536), reader)) is not None:
            match order:
                case Leave():
                    return
                case Put() | Get():
                    self._transfers.submit(self._answer, order)
                case _:
                    self._control.submit(self._answer, order)

    def _answer(self, call: Call) -> None:
        try:
            codes = [int(code) for code in self._run(call)]
        except Exception:
            codes = [BROKEN_CALL]
        with self._lock:
            self._sock.sendall(REPORTS.encode(OperationDone(call.seq, codes)))

    def _run(self, call: Call) -> list[int]:
        store = self._store
        match call:
            case AskPresent():
                return list(store.batch_is_exist([_name(key) for key in call.keys]))
            case Remove():
                # Forced, since a recent question of this client has leased the object for seconds.
                # A reader that loses the bytes by this notices a wrong checksum.
                return list(store.batch_remove([_name(key) for key in call.keys], True))
            case Put():
                address = self._base + call.first_byte
                name = _name(call.key)
                return [store.put_from(name, address, call.num_bytes, self._replication)]
            case Get():
                address = self._base + call.first_byte
                return [store.get_into(_name(call.key), address, call.num_bytes)]


if __name__ == "__main__":
    main()
