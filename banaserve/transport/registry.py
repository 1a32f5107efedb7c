"""Transports by name."""

from __future__ import annotations

from collections.abc import Callable

from banaserve.base.errors import UserError
from banaserve.base.names import check_known
from banaserve.transport.interface import Transport, TransportOptions
from banaserve.transport.regions.gpu_memory import CudaGpu

SHARED_MEMORY = "shm"
"""Name of the transport that works within one machine only."""
TCP = "tcp"
NIXL = "nixl"
Factory = Callable[[TransportOptions], Transport]


def _shm(options: TransportOptions) -> Transport:
    from banaserve.transport.backends.shm import ShmTransport

    return ShmTransport(options)


def _tcp(options: TransportOptions) -> Transport:
    from banaserve.transport.backends.tcp import TcpTransport

    return TcpTransport(options)


def _torch_distributed(options: TransportOptions) -> Transport:
    try:
        from banaserve.transport.backends.torch_distributed import TorchDistributedTransport
    except ImportError as error:
        raise UserError(f"transport torch_distributed needs torch: {error}") from None
    return TorchDistributedTransport(options)


def _nixl(options: TransportOptions) -> Transport:
    try:
        from banaserve.transport.backends.nixl import NixlTransport
    except ImportError as error:
        raise UserError(f"transport nixl needs `pip install banaserve[nixl]`: {error}") from None
    return NixlTransport(options, CudaGpu(options.device) if options.in_gpu_memory else None)


_FACTORIES: dict[str, Factory] = {
    SHARED_MEMORY: _shm,
    TCP: _tcp,
    "torch_distributed": _torch_distributed,
    NIXL: _nixl,
}


def names() -> list[str]:
    """Return the names of all transports, installed or not."""
    return sorted(_FACTORIES)


def create(name: str, options: TransportOptions) -> Transport:
    """Build the transport ``name``.

    Raises:
        UserError: There is no transport of this name, or a package that it needs is missing.
    """
    check_known("transport", name, _FACTORIES)
    return _FACTORIES[name](options)
