"""Requests to the migration coordinator and its answers: plain values, sent over HTTP as JSON."""

from __future__ import annotations

import msgspec

from banaserve.contracts.instances import NodeStatus

Heads = dict[int, tuple[int, ...]]
"""KV heads by layer."""
Experts = dict[int, tuple[int, ...]]
"""Routed experts by layer."""


class _ModulesRequest(
    msgspec.Struct,
    frozen=True,
    tag_field="kind",
    rename={"source": "from", "target": "to"},
    forbid_unknown_fields=True,
):
    source: str

    @property
    def copies_ahead(self) -> bool:
        """Return whether KV is copied while the host serves, not only at a standstill."""
        return True


class _MoveRequest(_ModulesRequest, frozen=True):
    target: str


class MoveLayers(_MoveRequest, frozen=True, tag="layers"):
    """Request to run layers ``layers[0]`` to ``layers[1] - 1`` of ``source`` beside ``target``.

    With ``precopy`` false everything is copied at a standstill, for comparison.
    """

    layers: tuple[int, int]
    precopy: bool = True

    @property
    def copies_ahead(self) -> bool:
        """Return ``precopy``."""
        return self.precopy


class MoveHeads(_MoveRequest, frozen=True, tag="heads"):
    """Request to run some KV heads of ``source``, with their query heads, beside ``target``."""

    heads: Heads


class MoveContext(_MoveRequest, frozen=True, tag="context"):
    """Request to attend beside ``target`` over older KV blocks of a range of layers.

    The layers are ``layers[0]`` to ``layers[1] - 1``. Older blocks are those that are full at the
    time of the move; blocks that fill later stay on ``source``.
    """

    layers: tuple[int, int]


class MoveExperts(_MoveRequest, frozen=True, tag="experts"):
    """Request to compute some routed experts of ``source`` beside ``target``; the router stays."""

    experts: Experts


class Return(_ModulesRequest, frozen=True, tag="return"):
    """Request to return modules of ``source`` home: the layers, heads or experts named, or all."""

    layers: tuple[int, int] | None = None
    heads: Heads | None = None
    experts: Experts | None = None


MigrationRequest = MoveLayers | MoveHeads | MoveContext | MoveExperts | Return

OPEN_STATES = ("waiting", "running")


class MoveStatus(msgspec.Struct):
    """Progress of the move of one unit.

    Attributes:
        unit_id: Id of the unit while it is away.
        modules: Modules of the unit in words.
        to: Instance beside which the unit will run; None for home.
        phase: waiting, shrinking, starting, preparing, copying, committing, freeing, growing or
            done.
        seconds: Time spent in each phase so far, in seconds, by phase.
        facts: Measurements of the host, by the names of ``MoveFacts``: bytes, rounds, stall.
    """

    move_id: str
    unit_id: str
    modules: str
    to: str | None
    phase: str = "waiting"
    seconds: dict[str, float] = {}
    facts: dict[str, int | float] = {}


class Migration(msgspec.Struct):
    """Migration: one request to the coordinator, with one move or several.

    Attributes:
        state: waiting (for another migration of the same host), running, done, aborted or failed.
        error: Reason of a failure, complete or partial; empty if there was none.
        notes: Remarks, for example on freed bytes that add no block to the pool.
        predicted_bytes: Bytes of weights and KV that the migration takes on the target.
        blocks_gained: Number of blocks by which the host's pool has grown; negative if it shrank.
    """

    id: str
    kind: str
    host: str
    to: str | None
    state: str
    moves: list[MoveStatus]
    error: str = ""
    notes: list[str] = []
    predicted_bytes: int = 0
    blocks_gained: int = 0
    seconds: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.state in OPEN_STATES

    @property
    def reason(self) -> str:
        """``error``, by the name that other operations give it."""
        return self.error

    @reason.setter
    def reason(self, reason: str) -> None:
        self.error = reason

    def __str__(self) -> str:
        """Return the progress of the migration, for people."""
        what = "; ".join(f"{_short(move.modules)} {move.phase}" for move in self.moves)
        return f"{self.host} to {self.to}: {what}" if self.to else f"home to {self.host}: {what}"


def _short(words: str) -> str:
    """Return ``words`` shortened: the heads of many layers would fill the screen."""
    return words if len(words) <= 48 else f"{words[:45]}..."


class OverlapRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to cut an instance's steps into at most ``max_microbatches``; 1 waits for guests."""

    instance: str
    max_microbatches: int


class Overlapping(msgspec.Struct, frozen=True):
    """Status of the concurrent computation of an instance and the guests of its layers.

    Attributes:
        max_microbatches: Maximum micro-batches of a step; 1: the instance waits for its guests.
        blocker: Reason why steps are not cut; empty if they may be.
        steps_waited: Number of steps run as a whole: small, not cuttable, or predicted to be
            slower in parts.
        parts: Number of micro-batches of all steps while layers were away.
        prediction_error: Error of the predicted time of a step's layers, as a fraction, smoothed
            over the last steps.
    """

    max_microbatches: int
    blocker: str
    steps_cut: int
    steps_waited: int
    parts: int
    prediction_error: float


class ExpertLoadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request for the number of times that each expert of an instance was chosen.

    Attributes:
        counting: True to begin or go on counting; False to end it. Either returns the counts.
    """

    instance: str
    counting: bool = True


class ExpertLoad(msgspec.Struct, frozen=True):
    """Number of times that an instance's routers chose each expert since counting began.

    Attributes:
        chosen: Counts of all experts in order, by layer; layers without experts are left out.
    """

    instance: str
    chosen: dict[int, list[int]]


class ShareRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to bound the share of a device that all guests beside an instance together take."""

    instance: str
    fraction: float


class GuestSharing(msgspec.Struct, frozen=True):
    """Share of an instance's device that guests take, and its cost to the instance's own requests.

    Attributes:
        fraction: Fraction of the device that the guests may take.
        busy_fraction: Fraction of the device that the guests have recently taken.
        predicted_slow_down: Factor of a step's duration beside the guests, predicted from
            ``busy_fraction``.
        measured_slow_down: Factor measured by the kernel's accounts of the instance's threads,
            with their waits for any other work; None if the threads have hardly run.
    """

    instance: str
    fraction: float
    num_guests: int
    busy_fraction: float
    predicted_slow_down: float
    measured_slow_down: float | None


class LayersModules(msgspec.Struct, frozen=True, tag="layers"):
    """Layers ``start`` to ``end - 1``."""

    start: int
    end: int


class HeadsModules(msgspec.Struct, frozen=True, tag="heads"):
    """KV heads: pairs of a layer and its heads, ascending."""

    heads: list[tuple[int, list[int]]]


class ContextModules(msgspec.Struct, frozen=True, tag="context"):
    """Older blocks of layers ``start`` to ``end - 1``."""

    start: int
    end: int


class ExpertsModules(msgspec.Struct, frozen=True, tag="experts"):
    """Routed experts: pairs of a layer and its experts, ascending."""

    experts: list[tuple[int, list[int]]]


UnitModules = LayersModules | HeadsModules | ContextModules | ExpertsModules
"""Modules of a unit in JSON: one form for each kind, distinguished by ``type``."""


class UnitPlace(msgspec.Struct, frozen=True):
    """Unit that is away.

    Attributes:
        at: Instance beside which the unit runs.
        epoch: Epoch of the host when the unit was activated there.
        num_bytes: Bytes of weights, and of KV for the pool's size at the start; for older blocks
            the bytes of the blocks that have moved.
        words: Modules in words.
        whole_layers: Layers that run only in this unit: it has all of their weights and KV.
    """

    unit_id: str
    modules: UnitModules
    at: str
    guest_id: str
    epoch: int
    num_bytes: int
    words: str = ""
    whole_layers: list[int] = []


class GuestStatus(msgspec.Struct, frozen=True):
    """Guest beside ``target``.

    Attributes:
        pids: Process ids: one for each tensor-parallel rank of the host.
        num_bytes: Memory of the guest's own, in bytes.
        busy_fraction: Fraction of wall time that the guest computes.
        share: Share of its target's device that the guest may take.
        way: Transport of GPU memory by which its KV and large activations pass, or the reason why
            they go through host memory; empty on a CPU.
    """

    guest_id: str
    host: str
    target: str
    pids: tuple[int, ...]
    num_bytes: int
    busy_fraction: float
    share: float = 1.0
    way: str = ""


class InstancePlacement(msgspec.Struct, frozen=True):
    """Placement of an instance's modules.

    Attributes:
        migration_blocker: Reason why no module of the instance can move; empty if they can.
        units: Units that are away. Modules that are not listed are at home.
        num_blocks: Present number of KV blocks of the pool; ``blocks_gained`` of them are due to
            the units that are away.
        kv_bytes: Memory that backs the KV cache at present, in bytes.
        sharing: Sharing of the device with guests beside the instance; None if the instance does
            not answer.
        overlap: Concurrent computation with the guests of its layers; None if the instance does
            not answer.
        node: Node that the instance runs on; empty for the server's own machine.
        graph_sizes: Tokens of each CUDA graph that steps replay now; None without graphs.
        graphs_captured: Number of graphs captured again, for modules that are away.
    """

    id: str
    role: str
    state: str
    migration_blocker: str
    epoch: int = 0
    num_layers: int = 0
    num_kv_heads: int = 0
    num_blocks: int = 0
    blocks_gained: int = 0
    kv_bytes: int = 0
    units: list[UnitPlace] = []
    guests_lost: int = 0
    steps_lost: int = 0
    sharing: GuestSharing | None = None
    overlap: Overlapping | None = None
    node: str = ""
    graph_sizes: list[int] | None = None
    graphs_captured: int = 0


class ClusterPlacement(msgspec.Struct, frozen=True):
    """Placement of all instances, with all guests and recent migrations.

    Attributes:
        nodes: Nodes that engines run on; empty if they all run on the server's own machine.
    """

    instances: list[InstancePlacement]
    guests: list[GuestStatus]
    migrations: list[Migration]
    nodes: list[NodeStatus] = []
