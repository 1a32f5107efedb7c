"""Base of all transports: the regions of this process, and the service that answers peers."""

from __future__ import annotations

import secrets
import socket
import threading
from abc import ABC, abstractmethod

from banaserve.transport.channels.threaded_server import Service
from banaserve.transport.errors import RefusedError
from banaserve.transport.interface import TransportOptions
from banaserve.transport.regions.argument_checks import check_offer
from banaserve.transport.regions.descriptor import RegionDescriptor
from banaserve.transport.regions.offered_region import OfferedRegion
from banaserve.transport.regions.remote_region import RemoteRegion

REGION_ID_BYTES = 16


class OfferingTransport(ABC):
    """Transport with tables of its regions, whose service starts with the first offer."""

    name: str

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._offered: dict[bytes, OfferedRegion] = {}
        self._opened: set[RemoteRegion] = set()
        self._service: Service | None = None
        self._address = ""

    def offer(self, num_bytes: int, epoch: int) -> OfferedRegion:
        check_offer(num_bytes, epoch)
        with self._lock:
            if self._service is None:
                listener, self._address = self._listen()
                self._service = Service(f"transport-{self.name}", listener, self._serve)
            region_id = secrets.token_bytes(REGION_ID_BYTES)
            region = self._reserve(
                RegionDescriptor(self.name, region_id, num_bytes, epoch, self._address)
            )
            self._offered[region_id] = region
            return region

    def open(self, descriptor: RegionDescriptor, timeout_s: float) -> RemoteRegion:
        if descriptor.transport != self.name:
            raise RefusedError(
                f"a region of transport {descriptor.transport!r} is not one of {self.name}"
            )
        remote = self._connect(descriptor, timeout_s)
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

    def forget_opened(self, remote: RemoteRegion) -> bool:
        """Remove an opened region from its table; return False if it was removed before."""
        with self._lock:
            known = remote in self._opened
            self._opened.discard(remote)
            return known

    def forget_offered(self, region: OfferedRegion) -> bool:
        """Remove an offered region from its table; return False if it was removed before."""
        with self._lock:
            return self._offered.pop(region.descriptor.region_id, None) is not None

    def _find(self, region_id: bytes) -> OfferedRegion | None:
        with self._lock:
            return self._offered.get(region_id)

    @abstractmethod
    def _listen(self) -> tuple[socket.socket, str]:
        """Return a listening socket and its address for peers."""

    @abstractmethod
    def _reserve(self, descriptor: RegionDescriptor) -> OfferedRegion:
        """Return the new region of a descriptor."""

    @abstractmethod
    def _connect(self, descriptor: RegionDescriptor, timeout_s: float) -> RemoteRegion:
        """Open a peer's region, see ``Transport.open``."""

    @abstractmethod
    def _serve(self, sock: socket.socket) -> None:
        """Serve one peer until it closes; any exception ends the connection."""
