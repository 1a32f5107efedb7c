"""NIXL: one-sided copies by UCX, over whatever it finds between the two machines.

Slices pass through a buffer that is registered once: registering a caller's memory anew for every
transfer costs more than the copy where a network card has to pin it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import msgspec
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from banaserve.transport.errors import PeerGoneError
from banaserve.transport.granted import GrantedTransport, Mover
from banaserve.transport.interface import Bytes
from banaserve.transport.local_region import LocalRegion
from banaserve.transport.memory import Memory, Plan
from banaserve.transport.runs import Runs

NAME = "nixl"
_SPINS = 200
_PAUSE_S = 50e-6


class Access(msgspec.Struct, frozen=True, array_like=True):
    """What a peer's agent needs to reach a region."""

    metadata: bytes
    address: int


class NixlTransport(GrantedTransport):
    """One agent for each connection, at both ends: none of them outlives its peer."""

    name = NAME

    def _accept(self, region: LocalRegion) -> tuple[Mover, bytes]:
        owner = _Owner(region.memory)
        return owner, msgspec.msgpack.encode(owner.access)

    def _join(self, data: bytes, staging: Bytes) -> Mover:
        try:
            return _Peer(msgspec.msgpack.decode(data, type=Access), Memory.of(staging))
        except (msgspec.MsgspecError, RuntimeError) as error:
            raise PeerGoneError(f"the agents do not connect: {error}") from None


class _Agent(Mover):
    def __init__(self, memory: Memory) -> None:
        name = secrets.token_hex(8)
        self._agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self._memory = memory
        region = [(memory.address, memory.num_bytes, 0, "")]
        self._registered = self._agent.register_memory(region, "DRAM")

    def close(self) -> None:
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
            self._registered = None


class _Owner(_Agent):
    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.access = Access(self._agent.get_agent_metadata(), memory.address)

    def move(self, part: Plan, check_peer: Callable[[], None]) -> None:
        """The peer's agent moves the bytes."""


class _Peer(_Agent):
    def __init__(self, access: Access, staging: Memory) -> None:
        super().__init__(staging)
        self._access = access
        self._remote = self._agent.add_remote_agent(access.metadata)
        if isinstance(self._remote, bytes):
            self._remote = self._remote.decode()
        self._aborted = False

    def abort(self) -> None:
        self._aborted = True

    def move(self, part: Plan, check_peer: Callable[[], None]) -> None:
        if not part.num_bytes or not part.remote_offsets.size:
            return
        ours = np.arange(part.remote_offsets.size) * part.num_bytes + self._memory.address
        theirs = part.remote_offsets + self._access.address
        handle = self._agent.initialize_xfer(
            "WRITE" if part.writes else "READ",
            self._describe(ours, part.num_bytes),
            self._describe(theirs, part.num_bytes),
            self._remote,
        )
        try:
            self._finish(handle, check_peer)
        finally:
            self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        if self._registered is not None:
            self._agent.remove_remote_agent(self._remote)
        super().close()

    def _describe(self, addresses: Runs, num_bytes: int) -> object:
        runs = np.zeros((addresses.size, 3), np.uint64)
        runs[:, 0], runs[:, 1] = addresses, num_bytes
        return self._agent.get_xfer_descs(runs, "DRAM")

    def _finish(self, handle: object, check_peer: Callable[[], None]) -> None:
        state = self._agent.transfer(handle)
        spins = 0
        while state == "PROC":
            spins += 1
            if self._aborted:
                raise PeerGoneError("the transfer was broken off")
            if spins > _SPINS:
                check_peer()
                time.sleep(_PAUSE_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise PeerGoneError(f"the copy ended in state {state}")
