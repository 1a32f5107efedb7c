"""NIXL: one-sided copies by UCX, over any connection that UCX finds between the two machines.

Slices pass through a buffer that is registered once: to register a caller's memory for every
transfer costs more than the copy if a network card has to pin the memory.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from banaserve.transport.backends.channel_served import GrantedTransport, Mover
from banaserve.transport.errors import PeerGoneError
from banaserve.transport.interface import TransportOptions
from banaserve.transport.memory import Memory, Plan, Runs
from banaserve.transport.regions.gpu_memory import CudaGpu
from banaserve.transport.regions.offered_region import OfferedRegion

NAME = "nixl"
_SPINS = 200
_PAUSE_S = 50e-6


class NixlMemory(msgspec.Struct, frozen=True, array_like=True):
    """Kind of memory in NIXL's words: ``DRAM`` of the host, or ``VRAM`` of the GPU ``device``."""

    kind: Literal["DRAM", "VRAM"] = "DRAM"
    device: int = 0


class Access(msgspec.Struct, frozen=True, array_like=True):
    """Data that a peer's agent needs to reach a region."""

    metadata: bytes
    address: int
    place: NixlMemory


# At import: several threads use it, and msgspec publishes a type before it is complete.
_decoder = msgspec.msgpack.Decoder(Access)


class NixlTransport(GrantedTransport):
    """Transport with one agent for the process, started at its first use in about a second.

    Memory of a GPU is copied by UCX from GPU to GPU, if UCX and the network cards can do so.
    """

    name = NAME

    def __init__(self, options: TransportOptions, gpu: CudaGpu | None = None) -> None:
        super().__init__(options, gpu)
        self._place = NixlMemory() if gpu is None else NixlMemory(gpu.nixl_kind, gpu.index)
        self._starting = threading.Lock()
        self._shared: Agent | None = None

    def _agent(self) -> Agent:
        with self._starting:
            if self._shared is None:
                self._shared = Agent()
            return self._shared

    def _accept(self, region: OfferedRegion) -> tuple[Mover, bytes]:
        owner = _Owner(self._agent(), region.memory, self._place)
        return owner, msgspec.msgpack.encode(owner.access)

    def _meet(self, data: bytes, staging: Memory, check_peer: Callable[[], None]) -> Mover:
        try:
            access = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise PeerGoneError(f"the peer breaks the protocol: {error}") from None
        return _Peer(self._agent(), access, staging, self._place)


class Agent:
    """NIXL's agent, shared by threads of several regions, with a lock for every call of ``api``."""

    def __init__(self) -> None:
        self.api = nixl_agent(secrets.token_hex(8), nixl_agent_config(backends=["UCX"]))
        self.lock = threading.Lock()
        self._num_users: Counter[str] = Counter()

    def register(self, memory: Memory, place: NixlMemory) -> Any:
        span = memory.address, memory.num_bytes, place.device, ""
        with self.lock:
            return self.api.register_memory([span], place.kind)

    def deregister(self, registered: Any) -> None:
        with self.lock:
            self.api.deregister_memory(registered)

    def meet(self, metadata: bytes) -> str:
        """Add a peer's agent with its regions; return its name, or raise PeerGoneError."""
        with self.lock:
            try:
                name = self.api.add_remote_agent(metadata)
            except Exception as error:
                raise PeerGoneError(f"the agents do not connect: {error!r}") from None
            name = name.decode() if isinstance(name, bytes) else name
            self._num_users[name] += 1
            return name

    def part(self, name: str) -> None:
        """Forget a peer's agent, once for each ``meet``."""
        with self.lock:
            self._num_users[name] -= 1
            if not self._num_users[name]:
                del self._num_users[name]
                self.api.remove_remote_agent(name)


class _Owner(Mover):
    def __init__(self, agent: Agent, memory: Memory, place: NixlMemory) -> None:
        self._agent = agent
        self._registered = agent.register(memory, place)
        with agent.lock:
            self.access = Access(agent.api.get_agent_metadata(), memory.address, place)

    def move(self, part: Plan, check_peer: Callable[[], None]) -> None:
        """Leave the bytes to the peer's agent, which moves them."""

    def close(self) -> None:
        self._agent.deregister(self._registered)


class _Peer(Mover):
    def __init__(self, agent: Agent, access: Access, staging: Memory, place: NixlMemory) -> None:
        self._agent = agent
        self._remote = agent.meet(access.metadata)
        self._registered = agent.register(staging, place)
        self._access = access
        self._staging, self._place = staging, place
        self._aborted = False

    def abort(self) -> None:
        self._aborted = True

    def move(self, part: Plan, check_peer: Callable[[], None]) -> None:
        if not part.num_bytes or not part.remote_offsets.size:
            return
        ours = np.arange(part.remote_offsets.size) * part.num_bytes + self._staging.address
        theirs = part.remote_offsets + self._access.address
        api = self._agent.api
        with self._agent.lock:
            handle = api.initialize_xfer(
                "WRITE" if part.writes else "READ",
                self._describe(ours, part.num_bytes, self._place),
                self._describe(theirs, part.num_bytes, self._access.place),
                self._remote,
            )
            state = api.transfer(handle)
        try:
            self._finish(handle, state, check_peer)
        finally:
            with self._agent.lock:
                api.release_xfer_handle(handle)

    def close(self) -> None:
        self._agent.deregister(self._registered)
        self._agent.part(self._remote)

    def _describe(self, addresses: Runs, num_bytes: int, place: NixlMemory) -> Any:
        runs = np.zeros((addresses.size, 3), np.uint64)
        runs[:, 0], runs[:, 1], runs[:, 2] = addresses, num_bytes, place.device
        return self._agent.api.get_xfer_descs(runs, place.kind)

    def _finish(self, handle: Any, state: str, check_peer: Callable[[], None]) -> None:
        spins = 0
        while state == "PROC":
            spins += 1
            if self._aborted:
                raise PeerGoneError("the transfer was broken off")
            if spins > _SPINS:
                check_peer()
                time.sleep(_PAUSE_S)
            with self._agent.lock:
                state = self._agent.api.check_xfer_state(handle)
        if state != "DONE":
            raise PeerGoneError(f"the copy ended in state {state}")
