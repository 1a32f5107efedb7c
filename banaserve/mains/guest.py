"""Guest process: accepts its host's connection and serves the host until the host is gone."""

from __future__ import annotations

import tempfile
from pathlib import Path

from banaserve.engine.compat.config import VllmConfig, adopt_kernels
from banaserve.migration.guest.environment import guest_environment
from banaserve.migration.guest.server import GuestServer
from banaserve.migration.guest.throttle import start_threads
from banaserve.migration.modules.partial_model import device_of
from banaserve.migration.rpc.messages import GuestAddress

ACCEPT_TIMEOUT_S = 60.0


def serve(config: VllmConfig, address: GuestAddress) -> None:
    """Wait for the host at ``address`` and serve it until the host is gone.

    Args:
        config: vLLM's configuration of the host's engine.

    Raises:
        TransportError: No host connects.
    """
    adopt_kernels(config)
    transport = address.make_transport()
    start_threads(transport)
    with tempfile.TemporaryDirectory(prefix="guest-") as folder:
        channel = address.accept(ACCEPT_TIMEOUT_S)
        rendezvous = address.rendezvous or str(Path(folder) / "rendezvous")
        with guest_environment(config, rendezvous, address.rank):
            on_cpu = device_of(config).type == "cpu"
            gpu_transport = None if on_cpu else address.make_gpu_transport
            GuestServer(config, channel, transport, address.token, gpu_transport).serve()
