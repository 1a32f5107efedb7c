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
        unit: Type of the units of this kind.
        request: Type of the admin API's request that moves such a unit.
        asked: Function that returns the unit that a ``request`` names.
        asked_home: Function that returns the unit that a ``Return`` names; None if it names none
            of this kind.
        of_module: Function that returns the unit for one of the orchestrator's modules; None if
            the module is of another kind.
        build: Type of the message that lets a guest build a unit.
        run: Type of the message that lets a guest run a step of a unit.
        host_units: Function that returns, for an engine, the maker of host units by id and unit.
        guest_units: Function that returns, for a guest, the builder of units by message and the
            epoch of the offer.
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
