"""BanaServe Algorithm 1, repaired.

Faults and repairs:
  - The sets of Eq. 33 are computed once, so that the loop never ends. Here every step lowers the
    pressure (a convex sum over all instances and both resources) by a least amount, in the same
    projection in which the next step is weighed; and the number of steps of a plan is limited.
  - One number for a load hides figure 2(b). Here gaps are taken for each resource separately.
  - Layers and heads have the same condition. Here layers have a higher threshold, both are weighed
    wherever they apply, as are role switches and returns, and the greatest net benefit wins.
  - A coarse move can overshoot and be reversed forever. Here a move that does not lower the
    pressure is no candidate, so that no state recurs under constant load.
  - Eq. 35, the budgets of Eqs. 2 and 29 and the two thresholds are only in the paper's text. Here
    they are part of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from banaserve.base.types import Attempt, ClusterView, InstanceId, Module, Role, Step, SwitchRole
from banaserve.orchestrator.control.measure import ScalarLoad, judge
from banaserve.orchestrator.control.move_policies import candidates as migration_candidates
from banaserve.orchestrator.control.move_policies import effects, refusals, scoring, switching
from banaserve.orchestrator.control.move_policies.candidates import Pair
from banaserve.orchestrator.control.move_policies.interface import (
    MigrationPlan,
    Rejected,
    RejectReason,
)
from banaserve.orchestrator.control.move_policies.options import RepairedOptions
from banaserve.orchestrator.control.move_policies.scoring import Weighed
from banaserve.orchestrator.control.projection.projection import (
    Projected,
    Projection,
    gap_of,
    project,
    take,
)

_RETURNS_KEPT = 8
"""Number of returns weighed again after each step of a plan; before the first, all are weighed."""


_LEAST_SWITCHES = 2
"""Number of role switches within a dwell time that even a small cluster may have."""


class Repaired:
    """Policy that takes the best of moves of layers and heads, role switches and returns."""

    Options: ClassVar = RepairedOptions

    def __init__(self, options: RepairedOptions) -> None:
        self._options = options
        self._scalar = ScalarLoad(options.scalar, options.compute_weight)

    def plan(self, cluster: ClusterView) -> MigrationPlan:
        options = self._options
        judged = judge(cluster, options.stale_after_s)
        projection = project(cluster, judged.views, options.horizon_s)
        gap = gap_of(projection, self._scalar)
        is_active = gap > options.delta_up
        is_active |= cluster.is_balancing and gap > options.delta_down
        search = _Search(projection, cluster, options, is_active)
        reason = search.run()
        left = gap_of(projection, self._scalar) if search.steps else gap
        return MigrationPlan(
            tuple(search.steps),
            tuple(search.rejected),
            judged.left_out,
            gap,
            is_active and left > options.delta_down,
            reason,
        )


@dataclass
class _Search:
    """Construction of one plan."""

    projection: Projection
    cluster: ClusterView
    options: RepairedOptions
    is_active: bool
    steps: list[Step] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    returns: list[tuple[InstanceId, Module]] | None = None
    leading_s: float = float("-inf")

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

    def run(self) -> str:
        """Add steps until no candidate is worth it; return why there are no more."""
        while len(self.steps) < self.options.max_moves:
            best = self._best()
            if best is None:
                return "no candidate is worth it" if self.is_active else "the loads are even"
            step = best.step()
            self.steps.append(step)
            take(self.projection, step, self.options.horizon_s, self.cluster.now_s)
        return "as many steps as one plan may have"

    def _best(self) -> Weighed | None:
        """Return the candidate with the greatest net benefit; among equals, the first by name."""
        weighed = []
        left_s, self.leading_s = self._left_s(), float("-inf")
        for candidate in self._candidates():
            if isinstance(candidate, Rejected):
                self.rejected.append(candidate)
            elif candidate.cost_s > left_s:
                too_long = Rejected(
                    candidate.words, RejectReason.MIGRATION_BUDGET, candidate.cost_s
                )
                self.rejected.append(too_long)
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
        seeks = [migration_candidates.memory_pairs]
        if not self.steps or self.overlaps:
            seeks.append(
                migration_candidates.compute_pairs
            )  # without overlap, it only gives the reason for no pair: once per plan is enough
        for seek in seeks:
            helped: InstanceId | None = None
            for pair in seek(self.projection, self.cluster.now_s, self.options, self.rejected):
                if helped not in (None, pair.host.id):
                    break
                if scoring.most_net_s(pair.host, self.options) < self.leading_s:
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
        most_s = float("-inf")
        failed = self.cluster.failed
        for module in migration_candidates.modules(
            pair, heads, self.options, self.rejected, failed
        ):
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
        return refusals.may_change(
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
