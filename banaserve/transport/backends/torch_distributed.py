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

from banaserve.transport.backends.channel_served import GrantedTransport, Mover
from banaserve.transport.errors import PeerGoneError
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


# At import: several threads use it, and msgspec publishes a type before it is complete.
_decoder = msgspec.msgpack.Decoder(Rendezvous)


class TorchDistributedTransport(GrantedTransport):
    """Transport by gloo, with a group of two ranks for each region that a peer opens."""

    name = NAME

    def _accept(self, region: OfferedRegion) -> tuple[Mover, bytes]:
        host = self._options.host
        store = dist.TCPStore(host, 0, 2, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
        mover = _TorchMover(_OWNER, reserve(SLICE_BYTES), lambda: _group(store, host, _OWNER))
        return mover, msgspec.msgpack.encode(Rendezvous(host, store.port))

    def _meet(self, data: bytes, staging: Memory, check_peer: Callable[[], None]) -> Mover:
        try:
            where = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise PeerGoneError(f"the peer breaks the protocol: {error}") from None

        def join() -> dist.ProcessGroupGloo:
            store = dist.TCPStore(where.host, where.port, 2, is_master=False, timeout=_TIMEOUT)
            return _group(store, self._options.host, _PEER)

        mover = _TorchMover(_PEER, staging, join)
        mover.connect(check_peer)
        return mover


class _TorchMover(Mover):
    """One rank of a group. The owner's also copies between its region and its staging memory.

    Args:
        join: Function that connects the group; blocks.
    """

    def __init__(
        self, rank: int, staging: Memory, join: Callable[[], dist.ProcessGroupGloo]
    ) -> None:
        self._rank = rank
        self._staging = staging.view()
        self._join = join
        self._group: dist.ProcessGroupGloo | None = None
        self._aborted = False

    def connect(self, check_peer: Callable[[], None]) -> None:
        self._group = _meet(self._join, check_peer)

    def move(self, part: Plan, check_peer: Callable[[], None]) -> None:
        data = self._staging[: part.num_bytes * part.remote_offsets.size]
        is_owner = self._rank == _OWNER
        if is_owner and not part.writes:
            gather(Memory.of(data), part.local, part.remote_offsets, part.num_bytes)
        self._exchange(torch.from_numpy(data), sends=part.writes is not is_owner)
        if is_owner and part.writes:
            scatter(part.local, part.remote_offsets, Memory.of(data), part.num_bytes)

    def abort(self) -> None:
        # There is no call to abort, and dropping the group does not suffice: but a receive that
        # times out closes the pair, and other waiting transfers fail at once. The exception is a
        # send that has begun: it ends with the group's timeout.
        self._aborted = True
        if (group := self._group) is not None:
            unsent = torch.empty(1, dtype=torch.uint8)
            with suppress(RuntimeError):
                group.recv([unsent], 1 - self._rank, _NEVER_SENT).wait(_AT_ONCE)

    def close(self) -> None:
        self._group = None

    def _exchange(self, tensor: torch.Tensor, *, sends: bool) -> None:
        if not tensor.numel():
            return
        if (group := self._group) is None or self._aborted:
            raise PeerGoneError("the connection was broken off")
        (group.send if sends else group.recv)([tensor], 1 - self._rank, _TAG).wait()


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
