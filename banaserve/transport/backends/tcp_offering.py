"""Base of transports whose offering side answers on a TCP port."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod

from banaserve.transport.channels import authentication
from banaserve.transport.channels.authentication import Seal
from banaserve.transport.channels.connect import connect_tcp, tcp_address
from banaserve.transport.channels.stream import SocketStream
from banaserve.transport.channels.threaded_server import GREETING_S, Service, listen_tcp
from banaserve.transport.errors import RefusedError
from banaserve.transport.interface import RegionDescriptor, TransportOptions
from banaserve.transport.memory import Memory
from banaserve.transport.regions.argument_checks import check_offer
from banaserve.transport.regions.gpu_memory import Gpu
from banaserve.transport.regions.local_region import LocalRegion, reserve
from banaserve.transport.regions.remote_region import PlannedRegion

_ID_BYTES = 16


class ServedTransport(ABC):
    """Base transport with a table of regions, which accepts peers that know the secret.

    Args:
        gpu: GPU in whose memory regions are offered; None for memory of the host.
    """

    name: str

    def __init__(self, options: TransportOptions, gpu: Gpu | None = None) -> None:
        self._options = options
        self._gpu = gpu
        self._lock = threading.Lock()
        self._offered: dict[bytes, LocalRegion] = {}
        self._opened: set[PlannedRegion] = set()
        self._service: Service | None = None
        self._address = ""

    def offer(self, num_bytes: int, epoch: int) -> LocalRegion:
        check_offer(num_bytes, epoch)
        with self._lock:
            if self._service is None:
                listener = listen_tcp(self._options.host)
                self._address = tcp_address(listener)
                self._service = Service(f"transport-{self.name}", listener, self._answer)
            memory = self._reserve(num_bytes)
            region_id = secrets.token_bytes(_ID_BYTES)
            descriptor = RegionDescriptor(
                self.name, region_id, num_bytes, epoch, self._address, self._describe(memory)
            )
            region = LocalRegion(descriptor, memory, self._forget_offer, self._gpu)
            self._offered[region_id] = region
            return region

    def open(self, descriptor: RegionDescriptor, timeout_s: float) -> PlannedRegion:
        if descriptor.transport != self.name:
            raise RefusedError(
                f"a region of transport {descriptor.transport!r} is not one of {self.name}"
            )
        deadline = time.monotonic() + timeout_s
        sock = connect_tcp(descriptor.address.removeprefix("tcp:"), timeout_s)
        stream = SocketStream(sock)
        try:
            remote = self._open(
                descriptor,
                stream,
                authentication.greet(stream, self._options.secret, deadline),
                deadline,
            )
        except BaseException:
            stream.close()
            raise
        with self._lock:
            self._opened.add(remote)
        return remote

    def close(self) -> None:
        with self._lock:
            service, self._service = self._service, None
            opened, offered = list(self._opened), list(self._offered.values())
        for remote in opened:
            remote.close()
        for region in offered:
            region.close()
        if service is not None:
            service.close()

    def forget(self, remote: PlannedRegion) -> bool:
        """Remove an opened region from the table; return False if it was removed before."""
        with self._lock:
            known = remote in self._opened
            self._opened.discard(remote)
            return known

    def _forget_offer(self, region: LocalRegion) -> bool:
        with self._lock:
            return self._offered.pop(region.descriptor.region_id, None) is not None

    def _find(self, region_id: bytes) -> LocalRegion | None:
        with self._lock:
            return self._offered.get(region_id)

    def _answer(self, sock: socket.socket) -> None:
        stream = SocketStream(sock)
        deadline = time.monotonic() + GREETING_S
        self._serve(stream, authentication.welcome(stream, self._options.secret, deadline))

    def _reserve(self, num_bytes: int) -> Memory:
        return reserve(num_bytes) if self._gpu is None else self._gpu.reserve(num_bytes)

    def _describe(self, memory: Memory) -> bytes:
        return b""

    @abstractmethod
    def _serve(self, stream: SocketStream, seal: Seal) -> None:
        """Serve one peer until it closes; any exception ends the connection."""

    @abstractmethod
    def _open(
        self, descriptor: RegionDescriptor, stream: SocketStream, seal: Seal, deadline: float
    ) -> PlannedRegion:
        """Open the region of ``descriptor`` over a new connection."""
