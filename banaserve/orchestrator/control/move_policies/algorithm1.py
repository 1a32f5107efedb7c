"""BanaServe Algorithm 1 in two presets: as published, made to terminate, and repaired.

Published: as printed, the sets of Eq. 33 are computed before the loop, which never changes them, so
that the loop never ends once entered. The text under stage 4 says "repeat until no device
simultaneously meets overload and underload criteria"; accordingly, the sets are computed again from
the updated loads in every pass. Two termination conditions are added: a pass that cannot change
anything (neither branch applies, Eq. 35 forbids the move, or it cannot be carried out) ends the
loop, since all later passes would be equal; and an instance gives away no more modules than it has.
Everything else is unchanged, faults included. There are no budgets, dwell times or limits, and
loads may oscillate from one plan to the next.

Faults and repairs:
  - The sets of Eq. 33 are computed once. Repaired, every step lowers the pressure (a convex sum
    over all instances and both resources) by a least amount, in the same projection in which the
    next step is weighed; and the number of steps of a plan is limited.
  - One number for a load, the sum of Eq. 32, hides figure 2(b). Repaired, gaps are taken for each
    resource separately.
  - Layers and heads have the same condition, so that heads move only if layers cannot. Repaired,
    layers have a higher threshold, both are weighed wherever they apply, as are role switches and
    returns, and the greatest net benefit wins.
  - A moved part takes the same part of compute and memory with it, and the benefit of Eq. 35 is the
    fall of the signed gap: a coarse move can overshoot, count as better, and be reversed forever.
    Repaired, a move that does not lower the pressure is no candidate, so that no state recurs under
    constant load.
  - Eq. 35, the budgets of Eqs. 2 and 29 and the two thresholds are only in the paper's text.
    Repaired, they are part of the loop.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from math import inf
from typing import ClassVar

from banaserve.base.types import (
    Attempt,
    ClusterView,
    Influence,
    InstanceId,
    Load,
    Module,
    MoveModule,
    Role,
    Step,
    SwitchRole,
)
from banaserve.orchestrator.control.measure import ScalarLoad, judge, load_of
from banaserve.orchestrator.control.model.moving import migration_s
from banaserve.orchestrator.control.model.utilisation import published_efficiency
from banaserve.orchestrator.control.move_policies import effects, pairs, scoring, switching
from banaserve.orchestrator.control.move_policies.interface import (
    MigrationPlan,
    Rejected,
    RejectReason,
)
from banaserve.orchestrator.control.move_policies.options import (
    MoveOptions,
    PublishedOptions,
    RepairedOptions,
)
from banaserve.orchestrator.control.move_policies.pairs import Pair
from banaserve.orchestrator.control.move_policies.scoring import Weighed
from banaserve.orchestrator.control.projection import slabs
from banaserve.orchestrator.control.projection.projection import Projected, gap_of, project, take

_HORIZON_S = 1.0
"""Unit of waiting work in a projection, in seconds; the published load has no waiting work."""

_RETURNS_KEPT = 8
"""Number of returns weighed again after each step of a plan; before the first, all are weighed."""

_LEAST_SWITCHES = 2
"""Number of role switches within a dwell time that even a small cluster may have."""


class Published:
    """Policy that moves layers, or else heads, from the fullest to the emptiest instance."""

    Options: ClassVar = PublishedOptions

    def __init__(self, options: PublishedOptions) -> None:
        self._options = options

    def plan(self, cluster: ClusterView) -> MigrationPlan:
        return _PublishedSearch(cluster, self._options).plan()


class Repaired:
    """Policy that takes the best of moves of layers and heads, role switches and returns."""

    Options: ClassVar = RepairedOptions

    def __init__(self, options: RepairedOptions) -> None:
        self._options = options

    def plan(self, cluster: ClusterView) -> MigrationPlan:
        return _RepairedSearch(cluster, self._options).plan(self._options.max_moves)


class _Search(ABC):
    """Construction of one plan: its steps, each weighed in the projection after those before it.

    Attributes:
        gap: Gap of the loads before the first step.
        end: Reason why there is no further step.
    """

    gap: float
    end: str

    def __init__(self, cluster: ClusterView, options: MoveOptions, horizon_s: float) -> None:
        self.cluster, self.horizon_s = cluster, horizon_s
        self.scalar = ScalarLoad(options.scalar, options.compute_weight)
        self.judged = judge(cluster, options.stale_after_s)
        self.projection = project(cluster, self.judged.views, horizon_s)
        self.steps: list[Step] = []
        self.rejected: list[Rejected] = []

    def plan(self, max_moves: float = inf) -> MigrationPlan:
        """Return the plan, of at most ``max_moves`` steps."""
        while len(self.steps) < max_moves:
            best = self._best()
            if best is None:
                break
            self._take(best.step())
        else:
            self.end = "as many steps as one plan may have"
        steps, rejected, left_out = tuple(self.steps), tuple(self.rejected), self.judged.left_out
        return MigrationPlan(steps, rejected, left_out, self.gap, self._is_unbalanced(), self.end)

    @abstractmethod
    def _best(self) -> Weighed | None:
        """Return the next step, or None and set ``end``; reject the other candidates."""

    def _is_unbalanced(self) -> bool:
        """Return whether balancing goes on after this plan."""
        return False

    def _take(self, step: Step) -> None:
        self.steps.append(step)
        take(self.projection, step, self.horizon_s, self.cluster.now_s)


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


class _PublishedSearch(_Search):
    """Lines 10 to 19 of the algorithm."""

    end = "no instance is overloaded while another is underloaded"

    def __init__(self, cluster: ClusterView, options: PublishedOptions) -> None:
        super().__init__(cluster, options, _HORIZON_S)
        self.options = options
        self.loads = {v.id: load_of(v.report) for v in self.judged.views if v.report is not None}
        for step in cluster.under_way:
            self._add(step)
        scalars = {name: self.scalar.of(load) for name, load in self.loads.items()}
        self.extremes = _Extremes(scalars)
        self.gap = self.extremes.gap()

    def _add(self, step: Step) -> None:
        """Add the influence of ``step`` to the loads."""
        for name, felt in step.influence:
            if (old := self.loads.get(name)) is not None:
                self.loads[name] = Load(old.compute + felt.compute, old.memory + felt.memory)

    def _take(self, step: Step) -> None:
        super()._take(step)
        self._add(step)
        for name, _ in step.influence:
            self.extremes.change(name, self.scalar.of(self.loads[name]))

    def _best(self) -> Weighed | None:
        gap = self.extremes.gap()
        if gap <= self.options.delta:
            return None
        host = self.projection[self.extremes.greatest()]
        guest = self.projection[self.extremes.least()]
        found = self._weighed(Pair(host, guest, gap))
        if isinstance(found, Weighed):
            return found
        self.rejected.append(found)
        self.end = "the fullest instance can give nothing to the emptiest"
        return None

    def _weighed(self, pair: Pair) -> Weighed | Rejected:
        """Return MigrateLayer or MigrateKVHeads, or why neither is possible."""
        (host, guest, gap), options = pair, self.options
        heads = not host.facts.can_move_layers
        kind = "heads" if heads else "layers"
        words = f"move {kind} from {host.id} to {guest.id}"
        refusal = (
            pairs.may_pair(host, guest, heads) or pairs.may_host(host) or pairs.may_guest(guest)
        )
        if Attempt(kind, host.id, guest.id) in self.cluster.failed:
            refusal = RejectReason.FAILED
        if refusal is not None:
            return Rejected(words, refusal, gap)
        module = self._module(host, heads)
        if module is None:
            return Rejected(words, RejectReason.NO_MODULE, gap)
        words = scoring.words_of("move", module, host.id, guest.id)
        effect = effects.memory_effect(host, guest, module, options)
        for instance, added in ((host, effect.host_blocks), (guest, effect.guest_blocks)):
            if refusal := scoring.room_refusal(instance, added, options):
                return Rejected(words, refusal, gap)
        load, share = self.loads[host.id], slabs.share(host.facts, module)
        moved = Load(load.compute * share, load.memory * share)
        cost_s = migration_s(effect.moved_bytes, options.link.over(host.far.get(guest.id)))
        closed = 2 * self.scalar.of(moved) if self.scalar.how != "maximum" else gap * share
        value = published_efficiency(gap, gap - closed, cost_s) if cost_s > 0 else inf
        if value < options.rho_per_s:
            return Rejected(words, RejectReason.NOT_WORTH_IT, value)
        blocks = effect.host_blocks, effect.guest_blocks
        on_host = Influence(-moved.compute, blocks[0], 0, memory=-moved.memory)
        on_guest = Influence(moved.compute, blocks[1], effect.guest_bytes, memory=moved.memory)
        both = tuple(sorted(((host.id, on_host), (guest.id, on_guest))))
        action = MoveModule(host.id, guest.id, module, effect.moved_bytes)
        timeout_s = options.timeout_s(cost_s)
        return Weighed(words, action, lambda: both, cost_s, closed, timeout_s, value, closed)

    def _module(self, host: Projected, heads: bool) -> Module | None:
        options = self.options
        size = options.heads_a_move if heads else options.layers_a_move
        total = slabs.num_movable(host.facts, heads)
        gone = round(host.away_share * total)
        if gone + size > options.max_away_fraction * total:
            return None
        return slabs.free(host.facts, host.taken, size, heads)


class _RepairedSearch(_Search):
    """Search for the best of all kinds of steps."""

    def __init__(self, cluster: ClusterView, options: RepairedOptions) -> None:
        super().__init__(cluster, options, options.horizon_s)
        self.options = options
        self.gap = gap_of(self.projection, self.scalar)
        self.is_active = self.gap > options.delta_up
        self.is_active |= cluster.is_balancing and self.gap > options.delta_down
        self.end = "no candidate is worth it" if self.is_active else "the loads are even"
        self.returns: list[tuple[InstanceId, Module]] | None = None
        self.leading_s = -inf

    def _is_unbalanced(self) -> bool:
        left = gap_of(self.projection, self.scalar) if self.steps else self.gap
        return self.is_active and left > self.options.delta_down

    @cached_property
    def overlaps(self) -> bool:
        """True if any host does not wait for all of a guest's work; no step changes that."""
        return any(effects.overlap_of(one, self.options) > 0 for one in self.projection.values())

    @cached_property
    def num_switching(self) -> int:
        """Number of instances that may change roles within a dwell time, less those that just have.

        No step changes the number: a role switch exchanges prefill and decode, which both count.
        """
        options, now_s = self.options, self.cluster.now_s
        both = [p for p in self.projection.values() if p.role is not Role.COLOCATED]
        recent = sum(
            p.changed_s is not None and now_s - p.changed_s < options.dwell_s for p in both
        )
        return max(_LEAST_SWITCHES, int(options.switch_fraction * len(both))) - recent

    def _best(self) -> Weighed | None:
        """Return the candidate with the greatest net benefit; among equals, the first by name."""
        weighed = []
        left_s, self.leading_s = self._left_s(), -inf
        for candidate in self._candidates():
            if isinstance(candidate, Rejected):
                self.rejected.append(candidate)
            elif candidate.cost_s > left_s:
                reason = RejectReason.MIGRATION_BUDGET
                self.rejected.append(Rejected(candidate.words, reason, candidate.cost_s))
            else:
                weighed.append(candidate)
                self.leading_s = max(self.leading_s, candidate.net_s)
        if not weighed:
            return None
        best = min(weighed, key=lambda candidate: (-candidate.net_s, candidate.words))
        self.rejected += [
            Rejected(other.words, RejectReason.WORSE, other.efficiency)
            for other in weighed
            if other is not best
        ]
        return best

    def _left_s(self) -> float:
        """Return the rest of T_budget (Eq. 2), after steps under way and planned."""
        spent_s = sum(step.cost_s for step in (*self.cluster.under_way, *self.steps))
        return self.options.migration_budget_s - spent_s

    def _candidates(self) -> Iterator[Weighed | Rejected]:
        # Moves last: they are many, and moves that cannot be the best any more are not weighed.
        if self.is_active:
            yield from self._switches()
        yield from self._returns()
        if self.is_active:
            yield from self._moves()

    def _moves(self) -> Iterator[Weighed | Rejected]:
        """Yield moves for each resource, from the fullest host with a worthwhile move."""
        seeks = [pairs.memory_pairs]
        # Without overlap, it only gives the reason for no pair: once per plan is enough.
        if not self.steps or self.overlaps:
            seeks.append(pairs.compute_pairs)
        for seek in seeks:
            helped: InstanceId | None = None
            for pair in seek(self.projection, self.cluster.now_s, self.options, self.rejected):
                if helped not in (None, pair.host.id):
                    break
                if scoring.most_net_s(pair.host, pair.guest, self.options) < self.leading_s:
                    words = f"move modules from {pair.host.id} to {pair.guest.id}"
                    yield Rejected(words, RejectReason.WORSE)
                    continue
                for heads in (False, True):
                    for weighed in self._sizes(pair, heads):
                        yield weighed
                        if isinstance(weighed, Weighed):
                            helped = pair.host.id

    def _sizes(self, pair: Pair, heads: bool) -> Iterator[Weighed | Rejected]:
        """Yield modules of growing size, weighed, while a larger one can still be better."""
        most_s = -inf
        failed = self.cluster.failed
        for module in pairs.modules(pair, heads, self.options, self.rejected, failed):
            weighed = scoring.weigh_move(pair.host, pair.guest, module, self.options)
            yield weighed
            if isinstance(weighed, Rejected):
                if weighed.reason in (RejectReason.NO_ROOM, RejectReason.TOO_MUCH_AWAY):
                    return
            elif weighed.net_s < most_s:
                return
            else:
                most_s = weighed.net_s

    def _switches(self) -> Iterator[Weighed | Rejected]:
        is_limited = self._switches_left() < 1
        candidates = switching.switches(
            self.projection,
            self.options.min_per_role,
            lambda instance, role: self._switch_refusal(instance, role) is None,
        )
        for switch in candidates:
            if is_limited:
                yield Rejected(f"switch {switch.words}", RejectReason.SWITCH_LIMIT)
            elif reason := self._switch_refusal(switch.instance, switch.new):
                yield Rejected(f"switch {switch.words}", reason)
            else:
                yield scoring.weigh_switch(self.projection, switch, self.options)

    def _refusal(self, instance: Projected) -> RejectReason | None:
        options = self.options
        return pairs.may_change(
            instance, self.cluster.now_s, options.dwell_s, options.max_moves_per_instance
        )

    def _switch_refusal(self, instance: Projected, role: Role) -> RejectReason | None:
        failed = self.cluster.failed
        if failed and Attempt("role", instance.id, role.value) in failed:
            return RejectReason.FAILED
        return self._refusal(instance)

    def _switches_left(self) -> int:
        """Return how many more instances may change roles, after recent and planned switches."""
        planned = sum(
            isinstance(step.action, SwitchRole) for step in (*self.cluster.under_way, *self.steps)
        )
        return self.num_switching - planned

    def _returns(self) -> Iterator[Weighed | Rejected]:
        """Yield every return, weighed, before the first step, and later only the best of them."""
        promising = []
        for host, module in self._away():
            guest = self.projection.get(host.away[module].guest)
            if guest is None:
                continue
            if reason := self._return_refusal(host, guest):
                words = scoring.words_of("return", module, guest.id, host.id)
                yield Rejected(words, reason)
                continue
            weighed = scoring.weigh_return(host, guest, module, self.options)
            if isinstance(weighed, Weighed):
                promising.append((-weighed.net_s, host.id, module))
            yield weighed
        if self.returns is None:
            self.returns = [(host, module) for _, host, module in sorted(promising)[:_RETURNS_KEPT]]

    def _return_refusal(self, host: Projected, guest: Projected) -> RejectReason | None:
        if Attempt("return", guest.id, host.id) in self.cluster.failed:
            return RejectReason.FAILED
        return self._refusal(host) or self._refusal(guest)

    def _away(self) -> list[tuple[Projected, Module]]:
        """Return the modules that may come home: they are away, and no step moves them."""
        if self.returns is not None:
            kept = [(self.projection[host], module) for host, module in self.returns]
        else:
            kept = [(host, module) for host in self.projection.values() for module in host.away]
        return [
            (host, module)
            for host, module in kept
            if module in host.away and module not in host.moving
        ]
