"""Entry of a kind of migration unit in the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from banaserve.base.types import Module
from banaserve.contracts.migration_api import Return
from banaserve.engine.compat.config import VllmConfig
from banaserve.migration.rpc import messages
from banaserve.migration.units.base import MigrationUnit
from banaserve.migration.units.guest_unit import GuestUnit
from banaserve.migration.units.host_unit import HostEngine, HostUnit
from banaserve.transport.interface import Transport


@dataclass(frozen=True, slots=True)
class UnitKind:
    """Entry of a kind of unit in the registry.

    Attributes:
        request: Type of the admin API's request that moves such a unit.
        asked: Function that returns the unit that a ``request`` names.
        asked_home: Function that returns the unit that a ``Return`` names; None if it names none
            of this kind.
        of_module: Function that returns the unit for one of the orchestrator's modules; None if
            the module is of another kind.
        host: Type of a unit on its host; called with the unit's id, the unit and the engine.
        guest: Type of a unit in a guest; called with configuration, transport, the message
            ``Build`` and the epoch of the offer.
    """

    unit: type[MigrationUnit]
    request: type[Any]
    asked: Callable[[Any], MigrationUnit]
    asked_home: Callable[[Return], MigrationUnit | None]
    of_module: Callable[[Module], MigrationUnit | None]
    run: type[messages.Run]
    host: Callable[[str, Any, HostEngine], HostUnit]
    guest: Callable[[VllmConfig, Transport, Any, int], GuestUnit]

    @property
    def name(self) -> str:
        return self.unit.kind
