"""torch.distributed: two-sided sends and receives of gloo, served by a thread of the owner.

The groups are separate from the process's default group, which belongs to the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from banaserve.transport.backends.library_grants import GrantedTransport, Mover
from banaserve.transport.errors import PeerGoneError
from banaserve.transport.interface import TransportOptions
from banaserve.transport.memory import SLICE_BYTES, Memory, Plan, gather, scatter
from banaserve.transport.regions.offered_region import OfferedRegion, reserve

NAME = "torch_distributed"
_TIMEOUT = timedelta(seconds=10)
"""Timeout of connecting, and of a transfer in which the peer hangs."""
_AT_ONCE = timedelta(milliseconds=1)
_LOOK_S = 0.05
_OWNER, _PEER = range(2)
_TAG, _NEVER_SENT = 1, 2


class Rendezvous(msgspec.Struct, frozen=True, array_like=True):
    """Address of the store through which the two ranks of a group connect."""

    host: str
    port: int


class TorchDistributedTransport(GrantedTransport):
    """Transport by gloo, with a group of two ranks for each region that a peer opens."""

    name = NAME

    def __init__(self, options: TransportOptions) -> None:
        super().__init__(options)
        self._host = options.host

    def _accept(self, region: OfferedRegion) -> tuple[Mover, bytes]:
        store = dist.TCPStore(
            self._host, 0, 2, is_master=True, timeout=_TIMEOUT, wait_for_workers=False
        )
        where = Rendezvous(self._host, store.port)
        return _Owner(store, self._host), msgspec.msgpack.encode(where)

    def _meet(self, data: bytes, staging: Memory, check_peer: Callable[[], None]) -> Mover:
        try:
            where = msgspec.msgpack.decode(data, type=Rendezvous)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise PeerGoneError(f"the peer breaks the protocol: {error}") from None

        def join() -> dist.ProcessGroupGloo:
            store = dist.TCPStore(where.host, where.port, 2, is_master=False, timeout=_TIMEOUT)
            return _group(store, self._host, _PEER)

        return _Peer(_meet(join, check_peer), torch.from_numpy(staging.view()))


class _TorchMover(Mover):
    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._group: dist.ProcessGroupGloo | None = None
        self._aborted = False

    def abort(self) -> None:
        # There is no call to abort, and dropping the group does not suffice: but a receive that
        # times out closes the pair, and other waiting transfers fail at once. The exception is a
        # send that has begun: it ends with the group's timeout.
        self._aborted = True
        if (group := self._group) is not None:
            with suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NEVER_SENT).wait(
                    _AT_ONCE
                )

    def close(self) -> None:
        self._group = None

    def _exchange(self, tensor: torch.Tensor, *, sends: bool) -> None:
        if not tensor.numel():
            return
        if (group := self._group) is None or self._aborted:
            raise PeerGoneError("the connection was broken off")
        (group.send if sends else group.recv)([tensor], self._peer, _TAG).wait()


class _Owner(_TorchMover):
    def __init__(self, store: dist.Store, host: str) -> None:
        super().__init__(_PEER)
        self._store = store
        self._host = host
        self._staging = reserve(SLICE_BYTES).view()

    def connect(self, check_peer: Callable[[], None]) -> None:
        self._group = _meet(lambda: _group(self._store, self._host, _OWNER), check_peer)

    def move(self, part: Plan, check_peer: Callable[[], None]) -> None:
        data = self._staging[: part.num_bytes * part.remote_offsets.size]
        staged, tensor = Memory.of(data), torch.from_numpy(data)
        if part.writes:
            self._exchange(tensor, sends=False)
            scatter(part.local, part.remote_offsets, staged, part.num_bytes)
        else:
            gather(staged, part.local, part.remote_offsets, part.num_bytes)
            self._exchange(tensor, sends=True)


class _Peer(_TorchMover):
    def __init__(self, group: dist.ProcessGroupGloo, staging: torch.Tensor) -> None:
        super().__init__(_OWNER)
        self._group = group
        self._staging = staging

    def move(self, part: Plan, check_peer: Callable[[], None]) -> None:
        tensor = self._staging[: part.num_bytes * part.remote_offsets.size]
        self._exchange(tensor, sends=part.writes)


def _meet(
    make: Callable[[], dist.ProcessGroupGloo], check_peer: Callable[[], None]
) -> dist.ProcessGroupGloo:
    """Connect both ranks of a group, as long as ``check_peer`` does not raise.

    The library waits for its whole timeout and cannot be interrupted, so it waits in a thread,
    which is left running if the peer is gone.
    """
    made: Future[dist.ProcessGroupGloo] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(PeerGoneError(f"the process group does not come up: {error}"))

    threading.Thread(target=run, name="transport-gloo-connect", daemon=True).start()
    while True:
        try:
            return made.result(_LOOK_S)
        except TimeoutError:
            check_peer()


def _group(store: dist.Store, host: str, rank: int) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = _TIMEOUT
    return dist.ProcessGroupGloo(store, rank, 2, options)
