"""Contract between the front door and the workers of engines whose layers and heads can move."""

from __future__ import annotations

from enum import Enum

import msgspec

from banaserve.contracts.migration_api import Overlapping
from banaserve.contracts.move_phase import MovePhase
from banaserve.migration.rpc.messages import GuestAddress
from banaserve.migration.units.registry import AnyUnit


class LinkState(Enum):
    """Connection of a host to a guest. A lost connection stays lost until it is detached."""

    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"


class GuestLinkStatus(msgspec.Struct, frozen=True):
    """State of a guest as its host sees it.

    Attributes:
        reason: Reason why the guest was lost; empty if it was not.
        round_trips: Number of answers of the guest to parts of steps.
        steps_saved: Number of these answers whose blocks the guest saved to the store itself.
        way: Transport of memory of GPUs by which KV and large tensors of steps pass, or the reason
            why they go through host memory; empty on a CPU.
        num_passed: Number of tensors of steps that did not go through host memory.
    """

    state: LinkState
    reason: str = ""
    round_trips: int = 0
    share: float = 1.0
    steps_saved: int = 0
    way: str = ""
    num_passed: int = 0


class MoveFacts(msgspec.Struct, omit_defaults=True):
    """Measurements of a move; times in seconds, None for a value that is not measured yet.

    Attributes:
        prepare_s: Time to build the unit in its target, or to make room for it at home.
        planned_bytes: KV bytes of all copies that have begun, copied or not yet.
        activate_s: Time from the end of this copy until the target was ready to serve.
        swap_s: Time from then until the model's proxies were in place.
        stall_s: Stall of the engine: ``copy_s + activate_s + swap_s``.
        predicted_bytes: KV bytes that moved away, of the pool that the engine started with.
        freed_bytes: Bytes given back as the kernel counts them. This and ``predicted_bytes`` are
            measured if the source was the host.
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
        """Return the values that have been measured, by name."""
        values = msgspec.structs.asdict(self)
        return {name: value for name, value in values.items() if value is not None}


class MoveReport(msgspec.Struct, frozen=True):
    """Progress of a move.

    Attributes:
        dirty_blocks: Number of blocks written and not copied yet; None if no copy has begun, or
            copies are over.
    """

    move_id: str
    unit_id: str
    phase: MovePhase
    target: str | None
    reason: str
    dirty_blocks: int | None
    facts: MoveFacts


class CommitReport(msgspec.Struct, frozen=True):
    """Report of a move after its commit."""

    move: MoveReport
    epoch: int


class UnitStatus(msgspec.Struct, frozen=True):
    """Unit that is away.

    Attributes:
        num_older_blocks: Number of KV blocks that the guest holds of a context; None for other
            kinds of units.
    """

    unit_id: str
    modules: AnyUnit
    guest_id: str
    epoch: int
    num_older_blocks: int | None


class KvStatus(msgspec.Struct, frozen=True):
    """KV cache of a host.

    Attributes:
        blocks_gained: Number of blocks by which the pool may be larger than at the start.
        resident_bytes: Memory that backs the cache, in bytes; None if it was not asked for.
        written_blocks: Number of blocks that steps have written since the start, or since KV was
            last lost.
    """

    num_blocks: int
    max_blocks: int
    blocks_gained: int
    page_bytes: int
    num_layers: int
    resident_bytes: int | None
    written_blocks: int


class HostStatus(msgspec.Struct, frozen=True):
    """Placement, guests and moves as the host of a migration knows them.

    Attributes:
        steps_lost: Number of steps lost since the start; these steps were run again.
        graph_sizes: Tokens of each CUDA graph that steps replay now; None without graphs.
        graphs_captured: Number of graphs captured again, for modules that are away.
    """

    epoch: int
    guests: dict[str, GuestLinkStatus]
    moves: dict[str, MoveReport]
    units: list[UnitStatus]
    guests_lost: int
    steps_lost: int
    overlap: Overlapping
    kv: KvStatus
    graph_sizes: list[int] | None
    graphs_captured: int


class MigrationApi:
    """Methods of a worker, called by ``collective_rpc``; they run between two engine steps.

    All but ``commit`` and ``share`` return at once: long work runs in a thread, and
    ``status`` returns its progress. Every method refuses, with the reason, if the engine cannot
    migrate.
    """

    def banaserve_migration_attach(self, addresses: list[GuestAddress]) -> None:
        """Begin to connect to a guest; ``HostStatus.guests`` has the state of the connection.

        Start the guest first, or right after.

        Args:
            addresses: Addresses of the guest's processes, one for each tensor-parallel rank.
        """
        raise NotImplementedError

    def banaserve_migration_detach(self, guest_id: str) -> None:
        """End the connection, and so the guest; refused while a unit runs or moves there."""
        raise NotImplementedError

    def banaserve_migration_prepare(
        self, move_id: str, modules: AnyUnit, guest_id: str
    ) -> MoveReport:
        """Begin to build modules, all of them at home, in a guest.

        The unit's id is ``move_id`` from here on. A guest that serves cannot load layers: start
        another guest. The heads of a layer are named in ascending order.
        """
        raise NotImplementedError

    def banaserve_migration_move_on(
        self, move_id: str, unit_id: str, guest_id: str | None = None
    ) -> MoveReport:
        """Begin to move a unit that is away to another guest, or home if ``guest_id`` is None.

        Before a move home, shrink the pool if it has grown. The next steps are those after
        ``prepare``.
        """
        raise NotImplementedError

    def banaserve_migration_precopy(self, move_id: str) -> MoveReport:
        """Begin to copy written blocks in rounds until the rounds stop shrinking; repeatable."""
        raise NotImplementedError

    def banaserve_migration_commit(self, move_id: str) -> CommitReport:
        """Copy the remaining blocks and let the target serve; blocks for the stall.

        The phase must be ``copied``, or ``prepared``: then everything is copied at a standstill.
        """
        raise NotImplementedError

    def banaserve_migration_free(self, move_id: str) -> MoveReport:
        """Begin to free the source's memory; the unit cannot move until this is done."""
        raise NotImplementedError

    def banaserve_migration_abort(self, move_id: str) -> MoveReport:
        """Abort a move, at any time before its commit."""
        raise NotImplementedError

    def banaserve_migration_overlap(self, max_microbatches: int) -> Overlapping:
        """Set the maximum micro-batches of the next steps, for while ranges of layers are away.

        With micro-batches host and guests compute concurrently; with 1 the host waits for its
        guests. Refused if the number is out of range or steps of this engine cannot be cut.
        """
        raise NotImplementedError

    def banaserve_migration_share(self, guest_id: str, fraction: float) -> None:
        """Let a guest compute for at most this fraction of the time, in (0, 1].

        Waits for the guest's answer, which comes between two of its steps; refused while the guest
        loads layers.
        """
        raise NotImplementedError

    def banaserve_migration_experts(self, counting: bool) -> dict[int, list[int]]:
        """Return how often each routed expert was chosen since counting began, by layer.

        Args:
            counting: True to begin or go on counting; False to end it.
        """
        raise NotImplementedError

    def banaserve_migration_status(self, memory: bool = False) -> HostStatus:
        """Return the host's status; notices guests that have died.

        Args:
            memory: True to count the memory that backs the KV cache, which takes milliseconds.
        """
        raise NotImplementedError
