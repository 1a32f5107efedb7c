"""Entry of a kind of migration unit in the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from banaserve.engine.vllm.compat.config import VllmConfig
from banaserve.engine.vllm.migration.api import Return
from banaserve.engine.vllm.migration.rpc import messages
from banaserve.engine.vllm.migration.units.base import MigrationUnit
from banaserve.engine.vllm.migration.units.guest_unit import GuestUnit
from banaserve.engine.vllm.migration.units.host_unit import HostEngine, HostUnit
from banaserve.transport.interface import Transport
from banaserve.types import Module


@dataclass(frozen=True, slots=True)
class UnitKind:
    """Entry of a kind of unit in the registry.

    Attributes:
        unit: Its values.
        request: Of the admin API that moves one.
        asked: The value that a ``request`` names.
        asked_home: The value that a ``Return`` names; None where it names none of this kind.
        of_module: The value that stands for a module of the orchestrator's; None where it has
            another kind.
        build: Message that lets a guest build one.
        run: Message that lets a guest run a step of one.
        host_units: For each engine, what makes its units by id and value.
        guest_units: For each guest, what builds its units by message, each offered at an epoch.
    """

    unit: type[MigrationUnit]
    request: type[Any]
    asked: Callable[[Any], MigrationUnit]
    asked_home: Callable[[Return], MigrationUnit | None]
    of_module: Callable[[Module], MigrationUnit | None]
    build: type[messages.Build]
    run: type[messages.Run]
    host_units: Callable[[HostEngine], Callable[[str, Any], HostUnit]]
    guest_units: Callable[[VllmConfig, Transport], Callable[[Any, int], GuestUnit]]

    @property
    def name(self) -> str:
        return self.unit.kind
