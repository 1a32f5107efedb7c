"""Placement of a host's units, and the proxies in its model that carry it out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from banaserve.migration import checks
from banaserve.migration.kv.dirty_blocks import RemoteBlocks
from banaserve.migration.kv.host_kv import KvRun
from banaserve.migration.kv.remote_kv import RemoteKv, UnitLocation
from banaserve.migration.microbatch.overlap import Overlap
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.units.host_unit import HostEngine, HostUnit


class PlacementManager:
    """Owner of the model's proxies, changed between two steps, or in a step that loses a guest.

    Args:
        max_microbatches: Maximum micro-batches of a step; 1: the host waits for its guests.
    """

    def __init__(self, engine: HostEngine, max_microbatches: int) -> None:
        self.overlap = Overlap(
            engine.layers,
            engine.step_context,
            checks.overlap_blocker(engine.config, engine.attentions.values()),
            max_microbatches,
        )
        self._engine = engine
        self._host = engine.kv
        self._units: dict[str, HostUnit] = {}
        self._runs: dict[str, list[tuple[KvRun, RemoteKv | None]]] = {}

    def __iter__(self) -> Iterator[HostUnit]:
        return iter(list(self._units.values()))

    def at(self, link: GuestClient) -> list[HostUnit]:
        """Return the units that run in a guest."""
        return [u for u in self if u.residence is not None and u.residence.link is link]

    def put(self, unit: HostUnit, residence: UnitLocation | None) -> None:
        """Let a unit run in ``residence``, or at home if None."""
        self.overlap.step_aside()
        unit.residence = residence
        if residence is None:
            self._units.pop(unit.unit_id, None)
        else:
            self._units[unit.unit_id] = unit
        unit.install()
        if self._engine.compiled is not None and unit.replaces_modules:
            # Not the guest: the same proxies ask the next one.
            self._engine.compiled.call_modules(unit.unit_id, wanted=residence is not None)
        self._runs = {name: self._find_runs(name) for name in self._engine.attentions}
        self.overlap.step_in(self._why_wait())

    def set_overlap(self, max_microbatches: int) -> None:
        """Set the maximum micro-batches of a step, between two steps; see ``Overlap.allow``."""
        self.overlap.allow(max_microbatches)
        self.overlap.step_aside()
        self.overlap.step_in(self._why_wait())

    def _why_wait(self) -> str:
        """Return why the present placement rules out micro-batches; empty if it does not."""
        kinds: dict[GuestClient, str] = {}
        for unit in self:
            assert unit.residence is not None
            link = unit.residence.link
            if self._engine.config.kv_transfer_config is not None and unit.residence.has_landed:
                return "a guest that computes a part cannot take what the store loads for the next"
            if unit.microbatch_blocker:
                return unit.microbatch_blocker
            kind = kinds.setdefault(link, unit.modules.kind)
            if kind != unit.modules.kind:
                both = f"{kind} and {unit.modules.kind}"
                return f"guest {link.guest_id} has {both}, whose answers would mix"
        return ""

    # ---- places of blocks

    def where_is(self, name: str) -> Sequence[tuple[KvRun, RemoteKv | None]]:
        """Return the runs of an attention's page, each with the KV of its guest; None for the host.

        For single blocks the result of ``older_blocks`` takes precedence.
        """
        return self._runs.get(name) or [(KvRun(0, self._host.page_bytes), None)]

    def _find_runs(self, name: str) -> list[tuple[KvRun, RemoteKv | None]]:
        found: list[tuple[KvRun, RemoteKv | None]] = []
        away: set[int] = set()
        for unit in self:
            if name in unit.names and unit.residence is not None:
                heads = unit.moved_heads(name)
                found += [(run, unit.residence.kv) for run in self._host.runs(heads)]
                away.update(heads)
        here = [head for head in range(self._host.num_heads) if head not in away]
        return found + [(run, None) for run in self._host.runs(here)]

    def older_blocks(self, name: str) -> tuple[RemoteBlocks, RemoteKv] | None:
        """Return the single blocks of an attention in a guest, and their KV; None without any."""
        for unit in self:
            blocks = unit.single_blocks
            if blocks is not None and unit.residence is not None and name in unit.names:
                return blocks, unit.residence.kv
        return None
