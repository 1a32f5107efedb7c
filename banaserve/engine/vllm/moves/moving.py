"""Live migration for one run of the server: its parts put together."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from vllm.config import VllmConfig

from banaserve.engine.vllm.cluster import Cluster
from banaserve.engine.vllm.launcher import Launcher
from banaserve.engine.vllm.moves.coordinator import Coordinator
from banaserve.engine.vllm.moves.guests import Guest, Guests
from banaserve.engine.vllm.moves.overseer import Overseer
from banaserve.engine.vllm.moves.sizes import machine_available_bytes, model_facts

TRANSPORT = "shm"
"""Guests run on the machine of their host."""


@contextlib.asynccontextmanager
async def moving(
    cluster: Cluster,
    launcher: Launcher,
    config: VllmConfig,
    logs: Path,
    sockets: Path,
    guest_share: float,
) -> AsyncIterator[Coordinator]:
    """A coordinator for the instances of ``cluster``, with everything that looks after guests.

    Args:
        guest_share: Of an instance's device that guests beside it may take.
    """

    def guest_ended(guest: Guest) -> None:
        overseer.guest_ended(guest)

    guests = Guests(launcher, logs, sockets, TRANSPORT, guest_ended, guest_share)
    facts = model_facts(config)
    coordinator = Coordinator(cluster.instances, guests, facts, machine_available_bytes)
    overseer = Overseer(coordinator)
    cluster.on_ended.append(coordinator.instance_ended)
    overseer.start()
    try:
        yield coordinator
    finally:
        await overseer.stop()
        await coordinator.stop()
