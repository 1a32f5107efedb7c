"""Requests to the coordinator of migrations and its answers: plain values, over HTTP as JSON."""

from __future__ import annotations

import msgspec

from banaserve.engine.interface import NodeStatus

Heads = dict[int, tuple[int, ...]]
"""KV heads by layer."""
Experts = dict[int, tuple[int, ...]]
"""Routed experts by layer."""


class _AdminRequest(msgspec.Struct, frozen=True):
    @property
    def copies_ahead(self) -> bool:
        """Whether KV is copied while the host serves, and not all of it at a standstill."""
        return True


class MoveLayers(
    _AdminRequest,
    frozen=True,
    tag="layers",
    tag_field="kind",
    rename={"source": "from", "target": "to"},
    forbid_unknown_fields=True,
):
    """Run layers ``layers[0]`` to ``layers[1] - 1`` of ``source`` beside ``target``.

    ``precopy`` false copies everything at a standstill, for comparison.
    """

    source: str
    target: str
    layers: tuple[int, int]
    precopy: bool = True

    @property
    def copies_ahead(self) -> bool:
        """As asked for."""
        return self.precopy


class MoveHeads(
    _AdminRequest,
    frozen=True,
    tag="heads",
    tag_field="kind",
    rename={"source": "from", "target": "to"},
    forbid_unknown_fields=True,
):
    """Run some KV heads of ``source``, with their query heads, beside ``target``."""

    source: str
    target: str
    heads: Heads


class MoveContext(
    _AdminRequest,
    frozen=True,
    tag="context",
    tag_field="kind",
    rename={"source": "from", "target": "to"},
    forbid_unknown_fields=True,
):
    """Attend over the older KV blocks of layers ``layers[0]`` to ``layers[1] - 1`` elsewhere.

    Older are blocks that are full when they move; those that fill later stay on ``source``.
    """

    source: str
    target: str
    layers: tuple[int, int]


class MoveExperts(
    _AdminRequest,
    frozen=True,
    tag="experts",
    tag_field="kind",
    rename={"source": "from", "target": "to"},
    forbid_unknown_fields=True,
):
    """Compute some routed experts of ``source`` beside ``target``; its router stays."""

    source: str
    target: str
    experts: Experts


class Return(
    _AdminRequest,
    frozen=True,
    tag="return",
    tag_field="kind",
    rename={"source": "from"},
    forbid_unknown_fields=True,
):
    """Take home what ``source`` has away: these layers, heads or experts, or everything."""

    source: str
    layers: tuple[int, int] | None = None
    heads: Heads | None = None
    experts: Experts | None = None


MigrationRequest = MoveLayers | MoveHeads | MoveContext | MoveExperts | Return

OPEN_STATES = ("waiting", "running")


class MoveStatus(msgspec.Struct):
    """Progress of one unit.

    Attributes:
        unit_id: Its name while it is away.
        modules: In words.
        to: The instance beside which it will run; None: home.
        phase: waiting, shrinking, starting, preparing, copying, committing, freeing, growing or
            done.
        seconds: Spent in each phase so far.
        facts: What the host has measured, by the names of ``MoveFacts``: bytes, rounds, stall.
    """

    move_id: str
    unit_id: str
    modules: str
    to: str | None
    phase: str = "waiting"
    seconds: dict[str, float] = {}
    facts: dict[str, int | float] = {}


class Migration(msgspec.Struct):
    """One request to the coordinator.

    Attributes:
        state: waiting (for another one of the same host), running, done, aborted or failed.
        error: Why it failed, or why not all of it was done.
        notes: What is worth knowing: bytes that make no block, say.
        predicted_bytes: Weights and KV that it takes on the target.
        blocks_gained: By how much the host's pool has grown when it ended; negative: shrunk.
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


class OverlapRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cut an instance's steps into at most so many micro-batches; 1: it waits for its guests."""

    instance: str
    max_microbatches: int


class Overlapping(msgspec.Struct, frozen=True):
    """Whether an instance and the guests of its layers compute at once.

    Attributes:
        max_microbatches: That a step may be cut into; 1: the instance waits for its guests.
        blocker: Why steps are not cut; empty where they may be.
        steps_cut: So far; ``parts``: micro-batches of all steps while layers were away.
        steps_waited: Run as a whole, because no other was predicted to be faster.
        prediction_error: Of the time of a step's layers, smoothed over the last steps.
    """

    max_microbatches: int
    blocker: str
    steps_cut: int
    steps_waited: int
    parts: int
    prediction_error: float


class ExpertLoadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tell how often an instance's experts are chosen.

    Attributes:
        counting: Whether to go on counting; False ends it, and what was counted is told.
    """

    instance: str
    counting: bool = True


class ExpertLoad(msgspec.Struct, frozen=True):
    """How often the routers of an instance's layers have chosen each expert since it is counted.

    Attributes:
        chosen: By layer, expert by expert; layers without experts are left out.
    """

    instance: str
    chosen: dict[int, list[int]]


class ShareRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let guests beside an instance take at most this fraction of its device, all together."""

    instance: str
    fraction: float


class GuestSharing(msgspec.Struct, frozen=True):
    """Share of an instance's device that guests take, and its cost to the own streams.

    Attributes:
        fraction: That they may take.
        busy_fraction: That they have taken lately.
        predicted_slow_down: How many times as long steps take beside them, by ``busy_fraction``.
        measured_slow_down: The same by the kernel's accounts of the instance's threads, whoever
            kept them waiting; None where they have hardly run.
    """

    instance: str
    fraction: float
    num_guests: int
    busy_fraction: float
    predicted_slow_down: float
    measured_slow_down: float | None


class LayersModules(msgspec.Struct, frozen=True, tag="layers"):
    """Layers ``start`` to ``end``, without ``end``."""

    start: int
    end: int


class HeadsModules(msgspec.Struct, frozen=True, tag="heads"):
    """KV heads: pairs of a layer and its heads, ascending."""

    heads: list[tuple[int, list[int]]]


class ContextModules(msgspec.Struct, frozen=True, tag="context"):
    """Older blocks of layers ``start`` to ``end``, without ``end``."""

    start: int
    end: int


class ExpertsModules(msgspec.Struct, frozen=True, tag="experts"):
    """Routed experts: pairs of a layer and its experts, ascending."""

    experts: list[tuple[int, list[int]]]


UnitModules = LayersModules | HeadsModules | ContextModules | ExpertsModules
"""Modules of a unit in JSON, one form a kind, told apart by ``type``."""


class UnitPlace(msgspec.Struct, frozen=True):
    """A unit that is away.

    Attributes:
        modules: What it is made of.
        at: The instance beside which it runs.
        epoch: Of the host, when it was put to work there.
        num_bytes: Weights and KV of the pool's size at the start; of older blocks what is there.
        words: The modules in words.
        whole_layers: Layers that run nowhere else: all of their weights and KV are there.
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
    """A guest beside ``target``.

    Attributes:
        pids: Its processes: one for each tensor-parallel rank of its host.
        num_bytes: Memory that is its own.
        busy_fraction: Share of wall time that it computes, in [0, 1].
        share: Of its target's device that it may take.
    """

    guest_id: str
    host: str
    target: str
    pids: tuple[int, ...]
    num_bytes: int
    busy_fraction: float
    share: float = 1.0


class InstancePlacement(msgspec.Struct, frozen=True):
    """Placement of an instance's modules.

    Attributes:
        state: Of the instance.
        migration_blocker: Why none of it can move; empty where it can.
        units: Away. What is not listed is at home.
        num_blocks: Of its pool at present; ``blocks_gained`` of them are due to what is away.
        kv_bytes: Memory that backs its KV cache at present.
        sharing: With guests beside it; None where it does not answer.
        overlap: With the guests of its layers, likewise.
        node: That it runs on; empty for the server's own machine.
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


class ClusterPlacement(msgspec.Struct, frozen=True):
    """The whole cluster.

    Attributes:
        nodes: That engines run on; empty where that is the server's own machine.
    """

    instances: list[InstancePlacement]
    guests: list[GuestStatus]
    migrations: list[Migration]
    nodes: list[NodeStatus] = []
