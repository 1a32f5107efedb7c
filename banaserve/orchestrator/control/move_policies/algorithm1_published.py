"""BanaServe Algorithm 1 as published, made to terminate.

As printed, the sets of Eq. 33 are computed before the loop, which never changes them, so that the
loop never ends once entered. The text under stage 4 says "repeat until no device simultaneously
meets overload and underload criteria"; accordingly, the sets are computed again from the updated
loads in every pass. Two termination conditions are added: a pass that cannot change anything
(neither branch applies, Eq. 35 forbids the move, or it cannot be carried out) ends the loop, since
all later passes would be equal; and an instance gives away no more modules than it has.

Everything else is unchanged: the load is the sum of Eq. 32, so that figure 2(b) causes no move;
both branches have the same condition, so that heads move only if layers cannot; a moved part takes
the same part of compute and memory with it; the benefit of Eq. 35 is the fall of the signed gap, so
that a move that overshoots counts as better; there are no budgets, dwell times or limits. Loads may
oscillate from one plan to the next.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass, field
from typing import ClassVar

from banaserve.base.types import (
    Attempt,
    ClusterView,
    Influence,
    InstanceId,
    Load,
    Module,
    MoveModule,
    Step,
)
from banaserve.orchestrator.control.measure import ScalarLoad, judge, load_of
from banaserve.orchestrator.control.model.moving import migration_s
from banaserve.orchestrator.control.model.utilisation import published_efficiency
from banaserve.orchestrator.control.move_policies import effects, refusals, scoring
from banaserve.orchestrator.control.move_policies.interface import (
    MigrationPlan,
    Rejected,
    RejectReason,
)
from banaserve.orchestrator.control.move_policies.options import PublishedOptions
from banaserve.orchestrator.control.projection import slabs
from banaserve.orchestrator.control.projection.projection import (
    Projected,
    Projection,
    project,
    take,
)

_HORIZON_S = 1.0
"""Unit of waiting work in a projection, in seconds; the published load has no waiting work."""


class Published:
    """Policy that moves layers, or else heads, from the fullest to the emptiest instance."""

    Options: ClassVar = PublishedOptions

    def __init__(self, options: PublishedOptions) -> None:
        self._options = options
        self._scalar = ScalarLoad(options.scalar, options.compute_weight)

    def plan(self, cluster: ClusterView) -> MigrationPlan:
        judged = judge(cluster, self._options.stale_after_s)
        projection = project(cluster, judged.views, _HORIZON_S)
        loads = {v.id: load_of(v.report) for v in judged.views if v.report is not None}
        for step in cluster.under_way:
            for instance_id, felt in step.influence:
                if instance_id in loads:
                    old = loads[instance_id]
                    loads[instance_id] = Load(old.compute + felt.compute, old.memory + felt.memory)
        extremes = _Extremes({name: self._scalar.of(load) for name, load in loads.items()})
        gap = extremes.gap()
        loop = _Loop(
            projection,
            loads,
            extremes,
            self._scalar,
            self._options,
            cluster.now_s,
            cluster.failed,
        )
        reason = loop.run()
        return MigrationPlan(
            tuple(loop.steps), tuple(loop.rejected), judged.left_out, gap, reason=reason
        )


class _Extremes:
    """Maximum and minimum of changing loads, in O(log n) for each change."""

    def __init__(self, loads: dict[InstanceId, float]) -> None:
        self._loads = dict(loads)
        self._least = [(load, name) for name, load in loads.items()]
        self._greatest = [(-load, name) for name, load in loads.items()]
        heapq.heapify(self._least)
        heapq.heapify(self._greatest)

    def change(self, name: InstanceId, load: float) -> None:
        self._loads[name] = load
        heapq.heappush(self._least, (load, name))
        heapq.heappush(self._greatest, (-load, name))

    def least(self) -> InstanceId:
        while self._loads[self._least[0][1]] != self._least[0][0]:
            heapq.heappop(self._least)
        return self._least[0][1]

    def greatest(self) -> InstanceId:
        while self._loads[self._greatest[0][1]] != -self._greatest[0][0]:
            heapq.heappop(self._greatest)
        return self._greatest[0][1]

    def gap(self) -> float:
        """Return Eq. 34 of the extremes; above delta exactly if neither set of Eq. 33 is empty."""
        if not self._loads:
            return 0.0
        return self._loads[self.greatest()] - self._loads[self.least()]


@dataclass(slots=True)
class _Loop:
    """Lines 10 to 19 of the algorithm."""

    projection: Projection
    loads: dict[InstanceId, Load]
    extremes: _Extremes
    scalar: ScalarLoad
    options: PublishedOptions
    now_s: float
    failed: Container[Attempt]
    steps: list[Step] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    def run(self) -> str:
        while (gap := self.extremes.gap()) > self.options.delta:
            host = self.projection[self.extremes.greatest()]
            guest = self.projection[self.extremes.least()]
            if not self._migrate(host, guest, gap):
                return "the fullest instance can give nothing to the emptiest"
        return "no instance is overloaded while another is underloaded"

    def _migrate(self, host: Projected, guest: Projected, gap: float) -> bool:
        """Plan MigrateLayer or MigrateKVHeads; return whether one of them is possible."""
        heads = not host.facts.can_move_layers
        refusal = (
            refusals.may_pair(host, guest, heads)
            or refusals.may_host(host)
            or refusals.may_guest(guest)
        )
        kind = "heads" if heads else "layers"
        if Attempt(kind, host.id, guest.id) in self.failed:
            refusal = RejectReason.FAILED
        words = f"move {kind} from {host.id} to {guest.id}"
        if refusal is not None:
            return self._refuse(words, refusal, gap)
        module = self._module(host, heads)
        if module is None:
            return self._refuse(words, RejectReason.NO_MODULE, gap)
        return self._move(host, guest, module, gap)

    def _module(self, host: Projected, heads: bool) -> Module | None:
        options, facts = self.options, host.facts
        size = options.heads_a_move if heads else options.layers_a_move
        total = slabs.num_movable(facts, heads)
        gone = round(host.away_share * total)
        if gone + size > options.max_away_fraction * total:
            return None
        return slabs.free(facts, host.taken, size, heads)

    def _move(self, host: Projected, guest: Projected, module: Module, gap: float) -> bool:
        effect = effects.leaving(host, guest, module, self.options)
        for instance, added in ((host, effect.host_blocks), (guest, effect.guest_blocks)):
            if added < 0 and (refusal := scoring.room_refusal(instance, added, self.options)):
                return self._refuse_move(host, guest, module, refusal, gap)
        load = self.loads[host.id]
        share = slabs.share(host.facts, module)
        moved = Load(load.compute * share, load.memory * share)
        cost_s = migration_s(effect.moved_bytes, self.options.link.over(host.far.get(guest.id)))
        closed = 2 * self.scalar.of(moved) if self.scalar.how != "maximum" else gap * share
        value = published_efficiency(gap, gap - closed, cost_s) if cost_s > 0 else float("inf")
        if value < self.options.rho_per_s:
            return self._refuse_move(host, guest, module, RejectReason.NOT_WORTH_IT, value)
        influence = (
            (host.id, _influence(moved, -1, effect.host_blocks, 0)),
            (guest.id, _influence(moved, 1, effect.guest_blocks, effect.guest_bytes)),
        )
        action = MoveModule(host.id, guest.id, module, effect.moved_bytes)
        timeout_s = self.options.timeout_s(cost_s)
        step = Step(action, tuple(sorted(influence)), cost_s, closed, timeout_s)
        self.steps.append(step)
        take(self.projection, step, _HORIZON_S, self.now_s)
        self._update(host.id, moved, -1)
        self._update(guest.id, moved, 1)
        return True

    def _update(self, name: InstanceId, moved: Load, sign: int) -> None:
        old = self.loads[name]
        load = Load(old.compute + sign * moved.compute, old.memory + sign * moved.memory)
        self.loads[name] = load
        self.extremes.change(name, self.scalar.of(load))

    def _refuse_move(
        self, host: Projected, guest: Projected, module: Module, reason: RejectReason, value: float
    ) -> bool:
        words = scoring.words_of("move", module, host.id, guest.id)
        return self._refuse(words, reason, value)

    def _refuse(self, words: str, reason: RejectReason, value: float) -> bool:
        self.rejected.append(Rejected(words, reason, value))
        return False


def _influence(moved: Load, sign: int, kv_blocks: int, guest_bytes: int) -> Influence:
    return Influence(sign * moved.compute, kv_blocks, guest_bytes, 0.0, 0.0, sign * moved.memory)
