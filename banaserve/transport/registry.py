"""Transports by name."""

from __future__ import annotations

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.transport.interface import Transport, TransportOptions
from banaserve.transport.regions.gpu_memory import CudaGpu

SHARED_MEMORY = "shm"
"""Name of the transport that works within one machine only."""
TCP = "tcp"
NIXL = "nixl"
_TORCH_DISTRIBUTED = "torch_distributed"
_NAMES = (NIXL, SHARED_MEMORY, TCP, _TORCH_DISTRIBUTED)


def names() -> list[str]:
    """Return the names of all transports, installed or not."""
    return list(_NAMES)


def create(name: str, options: TransportOptions) -> Transport:
    """Build the transport ``name``.

    Raises:
        UserError: There is no transport of this name, or a package that it needs is missing.
    """
    check_known("transport", name, _NAMES)
    # Each library is imported only where its transport is used: torch and NIXL take seconds.
    try:
        if name == SHARED_MEMORY:
            from banaserve.transport.backends.shm import ShmTransport

            return ShmTransport(options)
        if name == TCP:
            from banaserve.transport.backends.tcp import TcpTransport

            return TcpTransport(options)
        if name == _TORCH_DISTRIBUTED:
            from banaserve.transport.backends.torch_distributed import TorchDistributedTransport

            return TorchDistributedTransport(options)
        from banaserve.transport.backends.nixl import NixlTransport
    except ImportError as error:
        package = "`pip install nixl`" if name == NIXL else "torch"
        raise UserError(f"transport {name} needs {package}: {error}") from None
    return NixlTransport(options, CudaGpu(options.device) if options.in_gpu_memory else None)
