"""Contract of the front door with the workers of engines whose layers and heads can move."""

from __future__ import annotations

from enum import Enum

import msgspec

from banaserve.engine.vllm.migration.microbatch.status import OverlapStatus
from banaserve.engine.vllm.migration.rpc.messages import GuestAddress, GuestUsage
from banaserve.engine.vllm.migration.types import MovePhase
from banaserve.engine.vllm.migration.units.registry import AnyUnit


class LinkState(Enum):
    """Connection of a host to a guest. A lost one stays so until it is detached."""

    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"


class GuestLinkStatus(msgspec.Struct, frozen=True):
    """A guest as its host sees it.

    Attributes:
        reason: Why it was lost; empty where it was not.
        round_trips: Steps that it has computed a part of.
        share: Of its target's device that it may take, in (0, 1].
        steps_saved: Steps whose blocks it has saved to the store itself.
    """

    state: LinkState
    reason: str = ""
    round_trips: int = 0
    share: float = 1.0
    steps_saved: int = 0


class MoveFacts(msgspec.Struct, omit_defaults=True):
    """Measurements of a move; None is not measured yet.

    Attributes:
        prepare_s: Of building the unit in its target, or of making room for it at home.
        weight_bytes: Loaded by the guest.
        rounds: Of copies while the source served.
        precopy_bytes: KV copied in them, also in one that is under way.
        planned_bytes: KV of all copies that have begun, copied or not yet.
        precopy_s: That they took.
        commit_blocks: Copied at the standstill.
        commit_bytes: KV of them.
        copy_s: That this took.
        activate_s: Until the target was ready to serve after that.
        swap_s: Until the model's proxies were in place after that.
        stall_s: Of the engine: ``copy_s + activate_s + swap_s``.
        predicted_bytes: What moved away of the pool that the engine started with.
        freed_bytes: Really given back, as the kernel counts; with ``predicted_bytes`` where the
            source was the host.
        free_s: That giving back took.
    """

    rounds: int = 0
    precopy_bytes: int = 0
    precopy_s: float = 0.0
    prepare_s: float | None = None
    weight_bytes: int | None = None
    planned_bytes: int | None = None
    commit_blocks: int | None = None
    commit_bytes: int | None = None
    copy_s: float | None = None
    activate_s: float | None = None
    swap_s: float | None = None
    stall_s: float | None = None
    predicted_bytes: int | None = None
    freed_bytes: int | None = None
    free_s: float | None = None

    def measured(self) -> dict[str, int | float]:
        """What has been measured, by name."""
        values = msgspec.structs.asdict(self)
        return {name: value for name, value in values.items() if value is not None}


class MoveReport(msgspec.Struct, frozen=True):
    """How far a move is.

    Attributes:
        target: Id of the guest that the unit goes to; None: home.
        reason: Why it has failed; empty where it has not.
        dirty_blocks: Written and not copied yet; None where no copy has begun, or copies are over.
        facts: Measured so far.
    """

    move_id: str
    unit_id: str
    phase: MovePhase
    target: str | None
    reason: str
    dirty_blocks: int | None
    facts: MoveFacts


class CommitReport(msgspec.Struct, frozen=True):
    """A move after its commit.

    Attributes:
        epoch: Of the placement that the commit has made.
    """

    move: MoveReport
    epoch: int


class UnitStatus(msgspec.Struct, frozen=True):
    """A unit that is away.

    Attributes:
        guest_id: Of the guest that runs it.
        epoch: Of the placement that put it to work there.
        num_older_blocks: KV blocks that the guest holds of a context; None of other units.
    """

    unit_id: str
    modules: AnyUnit
    guest_id: str
    epoch: int
    num_older_blocks: int | None


class KvStatus(msgspec.Struct, frozen=True):
    """The KV cache of a host.

    Attributes:
        num_blocks: Of the pool when the engine started.
        max_blocks: Room that is reserved.
        blocks_gained: By how much the pool may be larger than at the start.
        page_bytes: Of one block of one layer.
        num_layers: Of the model.
        resident_bytes: Memory that backs the cache; None where it was not asked for.
        written_blocks: That steps have written since the start, or since KV was last lost.
    """

    num_blocks: int
    max_blocks: int
    blocks_gained: int
    page_bytes: int
    num_layers: int
    resident_bytes: int | None
    written_blocks: int


class HostStatus(msgspec.Struct, frozen=True):
    """What runs where, as the host of a migration knows it.

    Attributes:
        epoch: Of the placement; grows with each change of it.
        guests: By id.
        moves: Under way, and the last of those that are over, by id.
        units: Away.
        guests_lost: Since the start, that held a unit.
        steps_lost: Since the start; they were run again.
    """

    epoch: int
    guests: dict[str, GuestLinkStatus]
    moves: dict[str, MoveReport]
    units: list[UnitStatus]
    guests_lost: int
    steps_lost: int
    overlap: OverlapStatus
    kv: KvStatus


class MigrationApi:
    """Methods of a worker, called by ``collective_rpc``; they run between two engine steps.

    All but ``commit`` and ``usage`` return at once: what takes long runs in a thread, ``status``
    tells how far it is. Every method refuses where the engine cannot migrate, with the reason.
    """

    def banaserve_migration_attach(self, addresses: list[GuestAddress]) -> None:
        """Begin to connect to a guest; ``HostStatus.guests`` tells how far that is.

        Start the guest first, or right after.

        Args:
            addresses: Of its processes, one for each tensor-parallel rank.
        """
        raise NotImplementedError

    def banaserve_migration_detach(self, guest_id: str) -> None:
        """End the connection, and so the guest; refused while a unit runs there or moves there."""
        raise NotImplementedError

    def banaserve_migration_prepare(
        self, move_id: str, modules: AnyUnit, guest_id: str
    ) -> MoveReport:
        """Begin to build modules, all of them at home, in a guest.

        The unit is called ``move_id`` from here on. A guest that serves cannot load layers: start
        another. The heads of a layer are named in ascending order.
        """
        raise NotImplementedError

    def banaserve_migration_move_on(
        self, move_id: str, unit_id: str, guest_id: str | None = None
    ) -> MoveReport:
        """Begin to move a unit that is away to another guest, or home where ``guest_id`` is None.

        Home: if the pool has grown, shrink it first. Then as for ``prepare``.
        """
        raise NotImplementedError

    def banaserve_migration_precopy(self, move_id: str) -> MoveReport:
        """Begin to copy rounds of written blocks until they stop shrinking; callable again."""
        raise NotImplementedError

    def banaserve_migration_commit(self, move_id: str) -> CommitReport:
        """Copy what is left and let the target serve; blocks for the stall.

        The phase must be prepared, and everything is copied at a standstill, or copied.
        """
        raise NotImplementedError

    def banaserve_migration_free(self, move_id: str) -> MoveReport:
        """Begin to give back the source's memory; until that is done the unit cannot move."""
        raise NotImplementedError

    def banaserve_migration_abort(self, move_id: str) -> MoveReport:
        """Give a move up, any time before its commit."""
        raise NotImplementedError

    def banaserve_migration_overlap(self, max_microbatches: int) -> OverlapStatus:
        """Cut steps into at most so many parts where ranges of layers are away, from the next on.

        So host and guests compute at once; with 1 guests are waited for. Refused out of range, and
        where steps of this engine cannot be cut.
        """
        raise NotImplementedError

    def banaserve_migration_share(self, guest_id: str, fraction: float) -> None:
        """Let a guest compute for at most this fraction of the time, in (0, 1].

        Waits, and is refused, as ``usage``.
        """
        raise NotImplementedError

    def banaserve_migration_usage(self, guest_id: str) -> GuestUsage:
        """What a guest takes of its target.

        Waits for the guest's answer, which comes between two of its steps; refused while it loads
        layers.
        """
        raise NotImplementedError

    def banaserve_migration_experts(self, counting: bool) -> dict[int, list[int]]:
        """How often each routed expert was chosen since it is counted, by layer.

        Args:
            counting: Begin to count, or go on; False ends it.
        """
        raise NotImplementedError

    def banaserve_migration_status(self, memory: bool = False) -> HostStatus:
        """What runs where; notices guests that have died.

        Args:
            memory: Count what backs the KV cache too, which takes milliseconds.
        """
        raise NotImplementedError
