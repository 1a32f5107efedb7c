"""Builder of a unit in a guest, which also opens the unit's KV: the work of PREPARE."""

from __future__ import annotations

import time

from banaserve.base.errors import MigrationError
from banaserve.migration.host.block_mover import BlockMover
from banaserve.migration.kv.dirty_blocks import DirtyBlockTracker
from banaserve.migration.kv.host_kv import HostKv
from banaserve.migration.kv.remote_kv import RemoteKv, StagedRemoteKv
from banaserve.migration.kv.unit_location import UnitLocation
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.time_hook import REAL_TIME, TimeHook
from banaserve.migration.units.host_unit import HostUnit
from banaserve.transport.errors import TransportError

BUILD_TIMEOUT_S = 600.0


class UnitBuilder:
    """Builder of units in guests; called by the threads of moves."""

    def __init__(self, kv: HostKv, time_hook: TimeHook = REAL_TIME) -> None:
        self._kv = kv
        self._time_hook = time_hook

    def build(
        self, unit: HostUnit, link: GuestClient, dirty_blocks: DirtyBlockTracker
    ) -> UnitLocation:
        """Let a guest build a unit, and open the unit's KV.

        Args:
            dirty_blocks: Blocks that are to be copied soon.

        Raises:
            MigrationError: The guest refuses.
            GuestLostError: The guest is gone.
        """
        began_s = time.perf_counter()
        request = unit.build_request()
        built = link.ask(request, messages.Built, BUILD_TIMEOUT_S, may_wait=True)
        residence = self._open(unit, link, built, dirty_blocks)
        self._time_hook.built(unit.modules, time.perf_counter() - began_s)
        return residence

    def _open(
        self,
        unit: HostUnit,
        link: GuestClient,
        built: messages.Built,
        dirty_blocks: DirtyBlockTracker,
    ) -> UnitLocation:
        """Open the KV of a built unit; nothing is left open on failure."""
        runs = {name: self._kv.runs(unit.heads(name)) for name in unit.names}
        residence: UnitLocation | None = None
        try:
            if built.landing_bytes:
                kv: RemoteKv = StagedRemoteKv(
                    link, unit.unit_id, built.region, runs, built.landing_bytes
                )
            else:
                kv = RemoteKv(link.transport, built.region, built.places, runs)
            residence = UnitLocation(unit.unit_id, link, kv, built.weight_bytes)
            residence.saves = built.saves
            kv.warm(dirty_blocks.ids())
        except TransportError as error:
            if residence is not None:
                residence.kv.close()
            raise link.give_up(f"its KV is out of reach: {error}") from error
        except OSError as error:
            if residence is not None:
                residence.leave()
            raise MigrationError(f"its KV cannot be mapped here: {error.strerror}") from error
        return residence

    def mover(
        self, unit: HostUnit, source: UnitLocation | None, target: UnitLocation | None
    ) -> BlockMover:
        """Return the mover for the copies of a move."""
        return BlockMover(
            unit,
            self._kv,
            source.kv if source else None,
            target.kv if target else None,
            self._time_hook,
        )
