"""Worker's side of the contract with the front door: see ``migration.worker_api``."""

from __future__ import annotations

from banaserve.base.errors import MigrationError
from banaserve.contracts.migration_api import Overlapping
from banaserve.contracts.rpc.typed_rpc import implements
from banaserve.engine.compat.runner import hooks as runner_hooks
from banaserve.migration.host.host import MigrationHost, attach
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.rpc.messages import GuestAddress
from banaserve.migration.units.registry import AnyUnit
from banaserve.migration.worker_api import (
    CommitReport,
    GuestLinkStatus,
    HostStatus,
    KvStatus,
    LinkState,
    MigrationApi,
    MoveReport,
    UnitStatus,
)


def guests_of(host: MigrationHost) -> dict[str, GuestLinkStatus]:
    """Return the state of each guest by its id; another thread may attach one meanwhile."""
    return host.attaching | {name: _guest(link) for name, link in host.links.copy().items()}


def status_of(host: MigrationHost, memory: bool) -> HostStatus:
    """Return the guests, moves, units and memory of a host."""
    graphs = host.engine.graphs
    return HostStatus(
        epoch=host.epoch,
        guests=guests_of(host),
        moves={move.move_id: move.report() for move in host.moves},
        units=[
            UnitStatus(
                unit.unit_id,
                unit.modules,
                unit.residence.link.guest_id,
                unit.residence.working_epoch,
                None if unit.single_blocks is None else len(unit.single_blocks),
            )
            for unit in host.placement
            if unit.residence is not None
        ],
        guests_lost=host.num_guests_lost,
        steps_lost=host.lost_steps.num_lost,
        overlap=host.placement.overlap.status(),
        kv=_kv(host, memory),
        graph_sizes=None if graphs is None else graphs.sizes,
        graphs_captured=0 if graphs is None else graphs.num_captured,
    )


def _kv(host: MigrationHost, memory: bool) -> KvStatus:
    kv = host.kv
    return KvStatus(
        num_blocks=kv.num_blocks,
        max_blocks=kv.max_blocks,
        blocks_gained=host.blocks_gained,
        page_bytes=kv.page_bytes,
        num_layers=len(kv.tensors),
        resident_bytes=kv.resident_bytes if memory else None,
        written_blocks=len(host.step_context.dirty_blocks),
    )


def _guest(link: GuestClient) -> GuestLinkStatus:
    state = LinkState.READY if link.lost is None else LinkState.LOST
    passed = 0 if link.lane is None else link.lane.num_passed
    return GuestLinkStatus(
        state, link.lost or "", link.round_trips, link.share, link.num_saved, link.way, passed
    )


class MigrationMethods:
    """Mix-in of vLLM's worker; ``MigrationApi`` documents each method."""

    def _migration(self) -> MigrationHost:
        found = runner_hooks.host_of(self.model_runner)  # type: ignore[attr-defined]
        if isinstance(found, MigrationHost):
            return found
        raise MigrationError(found or "this engine was started without live migration")

    @implements(MigrationApi.banaserve_migration_attach)
    def banaserve_migration_attach(self, addresses: list[GuestAddress]) -> None:
        host = self._migration()
        attach(host, addresses[host.ranks.rank])

    @implements(MigrationApi.banaserve_migration_detach)
    def banaserve_migration_detach(self, guest_id: str) -> None:
        self._migration().detach(guest_id)

    @implements(MigrationApi.banaserve_migration_prepare)
    def banaserve_migration_prepare(
        self, move_id: str, modules: AnyUnit, guest_id: str
    ) -> MoveReport:
        return self._migration().prepare(move_id, modules, guest_id).report()

    @implements(MigrationApi.banaserve_migration_move_on)
    def banaserve_migration_move_on(
        self, move_id: str, unit_id: str, guest_id: str | None = None
    ) -> MoveReport:
        return self._migration().prepare_again(move_id, unit_id, guest_id).report()

    @implements(MigrationApi.banaserve_migration_precopy)
    def banaserve_migration_precopy(self, move_id: str) -> MoveReport:
        return self._migration().precopy(move_id).report()

    @implements(MigrationApi.banaserve_migration_commit)
    def banaserve_migration_commit(self, move_id: str) -> CommitReport:
        host = self._migration()
        return CommitReport(host.commit(move_id).report(), host.epoch)

    @implements(MigrationApi.banaserve_migration_free)
    def banaserve_migration_free(self, move_id: str) -> MoveReport:
        return self._migration().free(move_id).report()

    @implements(MigrationApi.banaserve_migration_abort)
    def banaserve_migration_abort(self, move_id: str) -> MoveReport:
        return self._migration().abort(move_id).report()

    @implements(MigrationApi.banaserve_migration_overlap)
    def banaserve_migration_overlap(self, max_microbatches: int) -> Overlapping:
        placement = self._migration().placement
        placement.set_overlap(max_microbatches)
        return placement.overlap.status()

    @implements(MigrationApi.banaserve_migration_share)
    def banaserve_migration_share(self, guest_id: str, fraction: float) -> None:
        link = self._migration().free_link(guest_id)
        link.ask(messages.SetShare(fraction), messages.StepsDone)
        link.share = fraction

    @implements(MigrationApi.banaserve_migration_experts)
    def banaserve_migration_experts(self, counting: bool) -> dict[int, list[int]]:
        return self._migration().expert_load(counting=counting)

    @implements(MigrationApi.banaserve_migration_status)
    def banaserve_migration_status(self, memory: bool = False) -> HostStatus:
        host = self._migration()
        host.check_guests()
        return status_of(host, memory)
