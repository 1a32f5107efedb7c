"""Projected state of instances after the steps under way, and those planned so far, are done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from banaserve.base.types import (
    ClusterView,
    Distance,
    Influence,
    InstanceFacts,
    InstanceId,
    InstanceView,
    Load,
    Module,
    ModulePlacement,
    MoveModule,
    Role,
    SetStepTokens,
    Step,
    SwitchRole,
)
from banaserve.orchestrator.control.measure import ScalarLoad
from banaserve.orchestrator.control.projection import slabs

MAX_WAITING_SHARE = 4.0
"""Number of horizons to which waiting work is limited: more makes no difference."""


@dataclass(slots=True)
class Projected:
    """Projected state of one instance; mutable while a plan is made.

    Attributes:
        compute: Share of compute that running work takes; not limited to 1.
        waiting: Work that waits, as a share of the work possible within the horizon.
        wanted_blocks: KV blocks in use plus those that waiting requests would take.
        kv_blocks: Number of its KV blocks; at least one, so that shares of them are defined.
        step_s: Time of a step, in seconds; 0 if not measured.
        batch_tokens: Number of tokens of a step.
        overlap_fraction: Share of a guest's work that it would not wait for; None if unknown.
        far: Network paths to instances on other machines.
        away: Placements of its modules that run elsewhere.
        moving: Modules that a step under way moves.
        num_guests: Number of modules of other instances that it holds.
        num_moves: Number of steps that it takes part in.
        known_home: Cache of ``home``; None until computed after the last change.
        known_own_blocks: Cache of ``own_blocks``; None until computed.
        model_blocks: Cache of its KV blocks by ``slabs.blocks``; None until computed after the last
            change.
    """

    id: InstanceId
    facts: InstanceFacts
    role: Role
    compute: float
    waiting: float
    wanted_blocks: float
    kv_blocks: int
    guest_bytes: int
    step_s: float
    batch_tokens: float
    changed_s: float | None
    overlap_fraction: float | None = None
    away: dict[Module, ModulePlacement] = field(default_factory=dict)
    moving: list[Module] = field(default_factory=list)
    num_guests: int = 0
    num_moves: int = 0
    known_home: slabs.Home | None = None
    known_own_blocks: int | None = None
    model_blocks: int | None = None
    far: Mapping[InstanceId, Distance | None] = field(default_factory=dict)

    @property
    def compute_load(self) -> float:
        return self.compute + self.waiting

    @property
    def memory_load(self) -> float:
        return self.wanted_blocks / self.kv_blocks

    @property
    def load(self) -> Load:
        """Loads of compute and memory, both clipped to [0, 1]."""
        return Load(min(1.0, max(0.0, self.compute_load)), min(1.0, max(0.0, self.memory_load)))

    @property
    def away_share(self) -> float:
        """Share of the model's slabs that is away."""
        facts = self.facts
        return 1 - self.home.slabs / (facts.num_layers * facts.num_kv_heads)

    @property
    def taken(self) -> list[Module]:
        """Modules that cannot move: those away and those that are moving."""
        return [*self.away, *self.moving]

    @property
    def own_blocks(self) -> int:
        """Number of KV blocks that the instance would have with nothing moved."""
        if self.known_own_blocks is None:
            self.known_own_blocks = slabs.blocks(self.facts, (), 0)
        return self.known_own_blocks

    @property
    def home(self) -> slabs.Home:
        """Part of the instance that is at home."""
        if self.known_home is None:
            self.known_home = slabs.Home.of(self.facts, self.away)
        return self.known_home

    def blocks_with(self, home: slabs.Home, guest_bytes: int) -> int:
        """Return the KV blocks that it would have with ``home`` and ``guest_bytes``.

        The number is its reported number plus the change by the model of ``slabs``.
        """
        if self.model_blocks is None:
            self.model_blocks = self.home.blocks(self.facts, self.guest_bytes)
        after = home.blocks(self.facts, guest_bytes)
        return max(0, self.kv_blocks + after - self.model_blocks)

    def resize(self, influence: Influence) -> None:
        """Add the predicted changes of memory and of step time by a step of a plan."""
        self.model_blocks = None
        self.kv_blocks = max(1, self.kv_blocks + influence.kv_blocks)
        self.guest_bytes = max(0, self.guest_bytes + influence.guest_bytes)
        self.step_s = max(0.0, self.step_s + influence.step_s)


Projection = dict[InstanceId, Projected]


def project(cluster: ClusterView, views: Sequence[InstanceView], horizon_s: float) -> Projection:
    """Return ``views``, which have facts and reports, projected to the end of steps under way."""
    own_blocks: dict[int, int] = {}
    projection = {view.id: _projected(view, horizon_s, own_blocks) for view in views}
    for view in cluster.instances.values():
        for placement in view.placements:
            if placement.guest in projection:
                projection[placement.guest].num_guests += 1
    for step in cluster.under_way:
        take(projection, step, horizon_s, cluster.now_s)
    return projection


def _projected(view: InstanceView, horizon_s: float, own_blocks: dict[int, int]) -> Projected:
    """Return the present state of ``view``.

    Args:
        own_blocks: Cache of ``Projected.own_blocks`` by the identity of the facts.
    """
    # Takes most of the time of an empty plan over thousands of instances: no avoidable calls.
    report, facts = view.report, view.facts
    assert report is not None
    assert facts is not None
    role, speed, step_s = view.role, view.prefill_tokens_per_s, report.step_s
    guest_bytes, running, used = report.guest_bytes, report.num_running, report.kv_used_fraction
    away = {placement.module: placement for placement in view.placements}
    kv_blocks = report.num_kv_blocks
    if not kv_blocks:
        if away or guest_bytes:
            kv_blocks = slabs.blocks(facts, away, guest_bytes)
        else:
            known = own_blocks.get(id(facts))
            if known is None:
                known = own_blocks[id(facts)] = slabs.blocks(facts, (), 0)
            kv_blocks = known
    if kv_blocks < 1:
        kv_blocks = 1
    waiting = 0.0
    if speed > 0 and view.inflight_prefill_tokens:
        waiting = view.computable_prefill_tokens / speed / horizon_s
    # A waiting request waits for blocks at a decode instance, and for compute elsewhere.
    waiting_blocks = 0.0
    if role is Role.DECODE:
        batch_tokens: float = running
        if running:
            waiting_blocks = report.num_waiting * (used / running)
    else:
        batch_tokens = speed * step_s
    return Projected(
        view.id,
        facts,
        role,
        report.busy_fraction * report.step_fill_fraction,
        waiting if waiting < MAX_WAITING_SHARE else MAX_WAITING_SHARE,
        (used + (waiting_blocks if waiting_blocks < MAX_WAITING_SHARE else MAX_WAITING_SHARE))
        * kv_blocks,
        kv_blocks,
        guest_bytes,
        step_s,
        report.step_tokens or batch_tokens,
        view.changed_s,
        report.overlap_fraction,
        away,
        far=view.far,
    )


def take(projection: Projection, step: Step, horizon_s: float, now_s: float) -> None:
    """Change ``projection`` to the state after ``step`` is done."""
    action = step.action
    for instance_id, influence in step.influence:
        instance = projection.get(instance_id)
        if instance is None:
            continue
        # No max() and no call, for speed: a role switch influences all instances.
        compute, kv_blocks, guest_bytes, step_s, waiting_s, memory = influence
        compute += instance.compute
        instance.compute = compute if compute > 0 else 0.0
        waiting = instance.waiting + waiting_s / horizon_s
        instance.waiting = waiting if waiting > 0 else 0.0
        wanted = instance.wanted_blocks + memory * instance.kv_blocks
        instance.wanted_blocks = wanted if wanted > 0 else 0.0
        if kv_blocks or guest_bytes or step_s:
            instance.resize(influence)
    for instance_id in step.instances:
        if instance_id in projection:
            projection[instance_id].num_moves += 1
    if isinstance(action, SwitchRole):
        if action.instance in projection:
            projection[action.instance].role = action.role
        return
    if isinstance(action, SetStepTokens):
        return
    host, guest = projection.get(action.host), projection.get(action.guest)
    is_move = isinstance(action, MoveModule)
    if guest is not None:
        guest.num_guests += 1 if is_move else -1
    if host is None:
        return
    host.known_home = host.model_blocks = None
    host.moving.append(action.module)
    if is_move:
        placement = ModulePlacement(action.module, action.host, action.guest, 0, now_s)
        host.away[action.module] = placement
    else:
        host.away.pop(action.module, None)


def gap_of(projection: Projection, scalar: ScalarLoad) -> float:
    """Return the greatest difference of load between two instances.

    With ``maximum`` it is the greatest difference of any one resource: the maxima of two vectors
    can be equal though each is full in the resource in which the other is empty.
    """
    if len(projection) < 2:
        return 0.0
    if scalar.how == "maximum":
        # Written out for speed: two properties of each instance take twice as long.
        compute = [instance.compute + instance.waiting for instance in projection.values()]
        memory = [instance.wanted_blocks / instance.kv_blocks for instance in projection.values()]
        return max(_cut_gap(compute), _cut_gap(memory))
    numbers = [scalar.of(instance.load) for instance in projection.values()]
    return max(numbers) - min(numbers)


def _cut_gap(loads: Sequence[float]) -> float:
    """Return the greatest difference of two loads, both clipped to [0, 1]."""
    return min(1.0, max(0.0, max(loads))) - min(1.0, max(0.0, min(loads)))
