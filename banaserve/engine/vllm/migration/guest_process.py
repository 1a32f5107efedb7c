"""What runs inside a guest's process."""

from __future__ import annotations

import tempfile
from pathlib import Path

from vllm.config import VllmConfig

from banaserve.engine.vllm.migration.giving_way import start_threads
from banaserve.engine.vllm.migration.guest import Guest
from banaserve.engine.vllm.migration.guest_address import GuestAddress
from banaserve.engine.vllm.migration.stage import guest_environment

ACCEPT_TIMEOUT_S = 60.0


def serve(config: VllmConfig, address: GuestAddress) -> None:
    """Wait for the host at ``address`` and serve it until it is gone.

    Args:
        config: Of the host's engine.

    Raises:
        TransportError: Nobody comes.
    """
    transport = address.make_transport()
    start_threads(transport)
    with tempfile.TemporaryDirectory(prefix="guest-") as folder:
        channel = address.accept(ACCEPT_TIMEOUT_S)
        with guest_environment(config, str(Path(folder) / "rendezvous")):
            Guest(config, channel, transport, address.token).serve()
