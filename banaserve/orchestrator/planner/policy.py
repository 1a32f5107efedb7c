"""Elastic policy: the arrangement that serves the recent requests best, by forecast.

The policy examines the load at every turn, and plans early and at growing intervals while a load is
new, since evidence grows, and again when the load or the number of instances changes. The present
arrangement is kept unless another one is clearly better on the same requests. Roles, step sizes and
modules away are one search: a plan takes home the modules that prevent a role switch, and a module
stays away only while that is clearly better than having it at home.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from banaserve.base.types import (
    ClusterView,
    InstanceView,
    ObservedRequest,
    SetStepTokens,
    SwitchRole,
    total_back_pressure,
)
from banaserve.orchestrator.control.move_policies.interface import MigrationPlan
from banaserve.orchestrator.control.move_policies.registry import POLICIES
from banaserve.orchestrator.planner.candidates.planning import placements_of, steps_of
from banaserve.orchestrator.planner.decision import Change, Decision, LoadMemory, Situation
from banaserve.orchestrator.planner.forecast_profile import are_learnt, profile_of
from banaserve.orchestrator.planner.forecasting.load_change import load_stats
from banaserve.orchestrator.planner.options import ElasticOptions
from banaserve.orchestrator.planner.search import Search


@POLICIES.register("elastic")
class Elastic:
    """Policy that plans roles, step sizes, and which layers and heads are away; see the module."""

    Options: ClassVar = ElasticOptions

    def __init__(self, options: ElasticOptions) -> None:
        self.options = options

    def plan(self, cluster: ClusterView) -> MigrationPlan:
        return plan_of(decide(self.situation(cluster), self.options), cluster, self.options)

    def situation(self, cluster: ClusterView) -> Situation:
        """Return the input of a decision about ``cluster``."""
        ready = [view for view in cluster.instances.values() if view.ready]
        memory = cluster.memory if isinstance(cluster.memory, LoadMemory) else None
        return Situation(
            cluster.now_s,
            ready,
            cluster.requests,
            memory,
            bool(cluster.under_way),
            len(cluster.instances),
        )


def plan_of(decision: Decision, cluster: ClusterView, options: ElasticOptions) -> MigrationPlan:
    """Return the steps that carry out ``decision`` on ``cluster``; a fulfilled part needs none.

    An instance that is still changing is left alone: a second step would be refused.
    """
    has_modules = bool(decision.returns or decision.moves)
    changing = {
        step.action.instance
        for step in cluster.under_way
        if isinstance(step.action, SwitchRole | SetStepTokens)
    }
    changes = [change for change in decision.changes if change.instance not in changing]
    steps = steps_of(
        decision._replace(changes=changes),
        cluster.instances,
        profile_of(options, list(cluster.instances.values())) if has_modules else None,
        options.dilation,
        options.window_s,
    )
    return MigrationPlan(
        steps,
        tuple(decision.candidates),
        gap=decision.gain,
        memory=decision.memory,
        reason=decision.reason,
        is_ordered=has_modules,
    )


def decide(situation: Situation, options: ElasticOptions) -> Decision:
    """Return the changes to make. Pure; takes seconds if it forecasts."""
    now_s, requests, memory = situation.now_s, situation.requests, situation.memory
    if situation.is_changing:
        return Decision((), (), 0.0, memory, "a plan is under way")
    if not requests or not situation.instances:
        return Decision((), (), 0.0, memory, "there were no requests lately")
    if memory is None:
        start_s = requests[0].arrival_s
        memory = LoadMemory(start_s, start_s + options.first_plan_s)
    elif _is_new(requests, memory, now_s, options):
        since_s = now_s - options.recent_s / 2
        memory = LoadMemory(since_s, min(now_s, since_s + options.first_plan_s))
    elif (
        len(situation.instances) > memory.num_instances > 0
        or 0 < situation.num_instances < memory.num_instances
    ):
        memory = memory._replace(next_s=now_s, is_settled=False)  # another arrangement may be best
    if not memory.is_pressed and _is_pressed(situation, options):
        memory = memory._replace(next_s=now_s, is_settled=False, is_pressed=True)
    if now_s < memory.next_s:
        return Decision((), (), 0.0, memory, "the load is what it was")
    if options.are_times_learnt and not are_learnt(situation.instances):
        memory = memory._replace(next_s=now_s + options.first_plan_s)
        return Decision((), (), 0.0, memory, "what steps take has not been learnt yet")
    is_known = memory.is_settled and not _is_missing(memory.wanted, situation.instances)
    search = Search(situation, memory.since_s, options)
    decision = search.homeward(memory.num_for_home) if is_known else search.best()
    after = _after(decision, memory, situation, options)
    return decision._replace(memory=after._replace(num_instances=len(situation.instances)))


def _after(
    decision: Decision, memory: LoadMemory, situation: Situation, options: ElasticOptions
) -> LoadMemory:
    """Return the memory for the next decision: when it is due, and what has been planned."""
    now_s = situation.now_s
    age_s = now_s - memory.since_s
    wanted = tuple(decision.changes) or memory.wanted
    if age_s < options.settled_s:
        next_s = now_s + max(options.first_plan_s, age_s / 2)
        next_s = min(next_s, memory.since_s + options.settled_s)
        return memory._replace(next_s=next_s, wanted=wanted)
    next_s = float("inf")
    if decision.moves or placements_of(situation.instances):
        next_s = now_s + options.recheck_s
    elif decision.changes:
        next_s = now_s + max(options.recheck_s, age_s / 2)
    num_for_home = 0 if decision.memory is None else decision.memory.num_for_home
    return LoadMemory(
        memory.since_s, next_s, True, wanted, num_for_home, is_pressed=memory.is_pressed
    )


def _is_pressed(situation: Situation, options: ElasticOptions) -> bool:
    """Return whether prefill has waited for room in the store long enough for a new plan."""
    pressure = total_back_pressure(situation.instances)
    return pressure is not None and pressure.longest_s >= options.first_plan_s


def _is_missing(wanted: Sequence[Change], views: Iterable[InstanceView]) -> bool:
    """Return whether an instance does not have the role that the last plan gave it."""
    roles = {view.id: view.role for view in views}
    return any(roles.get(one.instance, one.role) is not one.role for one in wanted)


def _is_new(
    requests: Sequence[ObservedRequest], memory: LoadMemory, now_s: float, options: ElasticOptions
) -> bool:
    """Return whether the load of the last seconds differs from the load before."""
    border_s = now_s - options.recent_s
    if border_s - memory.since_s < options.recent_s:
        return False
    before_s = max(memory.since_s, border_s - options.window_s)
    before = load_stats(requests, before_s, border_s)
    now = load_stats(requests, border_s, now_s)
    return before.differs(now, options.least_change_fraction, options.deviations)
