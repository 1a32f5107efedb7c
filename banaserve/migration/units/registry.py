"""Kinds of migration units. To add one: write its file, and list its kind here.

No other code that moves a unit depends on its kind: the differences are methods of
``MigrationUnit``, ``HostUnit`` or ``GuestUnit``.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING

import msgspec

from banaserve.base.errors import MigrationError
from banaserve.base.types import Module
from banaserve.contracts.migration_api import MigrationRequest, Return, UnitModules
from banaserve.engine.compat.config import VllmConfig
from banaserve.migration.modules.partial_model import device_of, on_device
from banaserve.migration.rpc import messages
from banaserve.migration.units import context, experts, heads, layers
from banaserve.migration.units.base import MigrationUnit
from banaserve.migration.units.guest_unit import GuestUnit
from banaserve.migration.units.host_unit import HostEngine, HostUnit
from banaserve.migration.units.kind import UnitKind
from banaserve.transport.interface import Transport

KINDS: tuple[UnitKind, ...] = (layers.KIND, heads.KIND, context.KIND, experts.KIND)

if TYPE_CHECKING:
    AnyUnit = MigrationUnit
else:
    AnyUnit = functools.reduce(operator.or_, (kind.unit for kind in KINDS))
    """Units as they travel between processes: structs with the kind as their tag."""

_BY_REQUEST = {kind.request: kind for kind in KINDS}
_BY_NAME = {kind.name: kind for kind in KINDS}

decode_request = messages.request_decoder([messages.Build[AnyUnit], *(kind.run for kind in KINDS)])
"""Decoder of a host's requests to a guest; see ``messages.request_decoder``."""


# ---- forms of a unit


def write_modules(modules: MigrationUnit) -> UnitModules:
    """Return a unit in its form for JSON."""
    return msgspec.convert({"type": modules.kind, **modules.to_wire()}, UnitModules)


def unit_asked(ask: MigrationRequest) -> MigrationUnit | None:
    """Return the unit that a request to the coordinator names; None: all modules that are away.

    Raises:
        MigrationError: The request names several kinds.
    """
    if not isinstance(ask, Return):
        return _BY_REQUEST[type(ask)].asked(ask)
    named = [kind.asked_home(ask) for kind in KINDS]
    units = [unit for unit in named if unit is not None]
    if len(units) > 1:
        raise MigrationError("name layers, heads or experts, not several of them")
    return units[0] if units else None


def unit_of(module: Module) -> MigrationUnit:
    """Return the unit for one of the orchestrator's modules."""
    found = (kind.of_module(module) for kind in KINDS)
    return next(unit for unit in found if unit is not None)


# ---- on the host and in the guest


def make_unit(unit_id: str, modules: MigrationUnit, engine: HostEngine) -> HostUnit:
    """Return modules that are at home as a unit.

    Raises:
        MigrationError: The modules cannot form a unit here, such as KV in an unreadable layout.
    """
    return _BY_NAME[modules.kind].host(unit_id, modules, engine)


def build_unit(
    config: VllmConfig, transport: Transport, request: messages.Build[MigrationUnit], epoch: int
) -> GuestUnit:
    """Build a unit in a guest and offer its KV at ``epoch``, on any thread.

    Raises:
        MigrationError: The unit cannot be built here.
    """
    with on_device(device_of(config)):
        return _BY_NAME[request.modules.kind].guest(config, transport, request, epoch)
