"""Elastic policy: the arrangement that serves best what has come lately, by forecast.

It looks at the load at every turn and plans when there is reason to: early and at ever longer
distances while a load is new, since evidence grows, and anew when the load is another one. What
runs is kept unless another arrangement is clearly better on the same requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, NamedTuple

from banaserve.costs import profile as profiles
from banaserve.elastic.arrangement import Arrangement, arrangement_of, arrangements, assign
from banaserve.elastic.forecast import (
    Forecast,
    FutureRequest,
    ServiceLimits,
    forecast,
    future_of,
)
from banaserve.elastic.load import load_stats
from banaserve.errors import UserError
from banaserve.names import check_known
from banaserve.orchestrator.migration.interface import MigrationPlan, Rejected, RejectReason
from banaserve.orchestrator.routing import registry as routings
from banaserve.sim.system import System
from banaserve.types import (
    ClusterView,
    InstanceId,
    InstanceView,
    ObservedRequest,
    Role,
    SetStepTokens,
    Step,
    SwitchRole,
)


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """Options of ``elastic``.

    Attributes:
        profile: Device and model of the forecast: a built-in profile's name, or its file.
        dilation: Seconds on the wall of one modelled second; 1 where time is not stretched.
        ttft_s, tpot_s: Limits of a request that is served well; 0 is none, and with neither the
            forecast looks at latency.
        chunks: Tokens of a step to choose from, separated by commas.
        min_step_tokens, max_step_tokens: What the engines can do: sizes beyond these become these;
            0 is no limit.
        roles: ``any``, or ``fixed`` where they stay what they are and only step sizes change.
        routing: Policy that routes in the forecast: the one that serves.
        first_plan_s: A load's first plan comes when it has lasted this long,
        first_ended: or when so many of its requests have ended, so that their lengths are known.
        settled_s: After this a load is known; it is planned for again when it changes.
        window_s: Requests of at most so long ago are forecast.
        horizon_s: So far a forecast looks.
        max_requests: That arrive in a forecast at most.
        screened_requests: Of those, the first, which every arrangement is forecast for.
        kept: Arrangements that are forecast for all of them, the best for the first ones.
        recent_s: Stretch that is compared with what came before it.
        least_change_fraction: A load that changes by less is the same.
        deviations: Of chance, by which a load must change.
        margin: Least gain of a forecast's mean worth, as a share of it, for which anything changes.
        certainty: Deviations of chance by which a gain must exceed nothing.
    """

    profile: str = "opt-13b-a100"
    dilation: float = 1.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    chunks: str = "512,1024,2048"
    min_step_tokens: int = 0
    max_step_tokens: int = 0
    roles: str = "any"
    routing: str = "load_aware"
    first_plan_s: float = 4.0
    first_ended: int = 20
    settled_s: float = 120.0
    window_s: float = 60.0
    horizon_s: float = 40.0
    max_requests: int = 3000
    screened_requests: int = 500
    kept: int = 7
    recent_s: float = 10.0
    least_change_fraction: float = 0.15
    deviations: float = 5.0
    margin: float = 0.02
    certainty: float = 1.5

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "min_step_tokens", "max_step_tokens"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}: give 0 or more")
        for name in (
            "first_plan_s",
            "settled_s",
            "window_s",
            "max_requests",
            "recent_s",
            "dilation",
        ):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}: give more than 0")
        if self.roles not in ("any", "fixed"):
            raise UserError(f"roles is {self.roles!r}: give any or fixed")
        check_known("routing policy", self.routing, routings.names())
        if 0 < self.max_step_tokens < self.min_step_tokens:
            raise UserError(
                f"max_step_tokens is {self.max_step_tokens}: give at least min_step_tokens, "
                f"{self.min_step_tokens}"
            )
        sizes = self._sizes()
        if not sizes or min(sizes) < 1:
            raise UserError(f"chunks is {self.chunks!r}: give numbers of tokens, as 512,2048")

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Sizes of steps to choose from, each once, that the engines can do."""
        return tuple(sorted({self.feasible(size) for size in self._sizes()}))

    def feasible(self, step_tokens: int) -> int:
        """The size of a step that the engines take where ``step_tokens`` is asked for."""
        most = self.max_step_tokens or step_tokens
        return max(self.min_step_tokens, min(step_tokens, most))

    def _sizes(self) -> set[int]:
        try:
            return {int(one) for one in self.chunks.split(",")}
        except ValueError:
            return set()

    @property
    def routing_options(self) -> dict[str, Any]:
        """What the policy that routes is given in the forecast, in the time of it."""
        if self.routing != "slo_aware":
            return {}
        limits = self.limits
        return {"ttft_s": limits.ttft_s or 0.0, "tpot_s": limits.tpot_s or 0.0}

    @property
    def limits(self) -> ServiceLimits:
        ttft_s, tpot_s = self.ttft_s / self.dilation, self.tpot_s / self.dilation
        return ServiceLimits(ttft_s or None, tpot_s or None)


class LoadMemory(NamedTuple):
    """What one decision hands to the next.

    Attributes:
        since_s: Since when the load is the same.
        next_s: When to decide again though it is.
    """

    since_s: float
    next_s: float


class Situation(NamedTuple):
    """What a decision is made from; it passes between processes as it is."""

    now_s: float
    instances: Sequence[InstanceView]
    requests: Sequence[ObservedRequest]
    memory: LoadMemory | None


class Change(NamedTuple):
    """What one instance is to be from here on."""

    instance: InstanceId
    role: Role
    step_tokens: int


class Candidate(NamedTuple):
    """An arrangement that was forecast, in words, and the mean worth of its requests."""

    words: str
    worth: float


class Decision(NamedTuple):
    """What is to change, in this order, and why not more.

    Attributes:
        gain: By how much the worth of a request rises.
    """

    changes: Sequence[Change]
    candidates: Sequence[Candidate]
    gain: float
    memory: LoadMemory | None
    reason: str


class Elastic:
    """Plans roles and step sizes; see the module."""

    Options: ClassVar = ElasticOptions

    def __init__(self, options: ElasticOptions) -> None:
        self.options = options

    def plan(self, cluster: ClusterView) -> MigrationPlan:
        return plan_of(decide(self.situation(cluster), self.options), cluster, self.options)

    def situation(self, cluster: ClusterView) -> Situation:
        """Returns what a decision about ``cluster`` needs."""
        ready = [view for view in cluster.instances.values() if view.ready]
        memory = cluster.memory if isinstance(cluster.memory, LoadMemory) else None
        return Situation(cluster.now_s, ready, cluster.requests, memory)


def plan_of(decision: Decision, cluster: ClusterView, options: ElasticOptions) -> MigrationPlan:
    """Returns ``decision`` as steps for ``cluster``; what is so already needs none.

    An instance that is changing still is left alone: a second step would be refused.
    """
    steps = []
    changing = {
        step.action.instance
        for step in cluster.under_way
        if isinstance(step.action, SwitchRole | SetStepTokens)
    }
    for change in decision.changes:
        view = cluster.instances.get(change.instance)
        if view is None or not view.ready or change.instance in changing:
            continue
        action: SwitchRole | SetStepTokens
        if view.role is not change.role:
            action = SwitchRole(view.id, view.role, change.role, change.step_tokens)
        elif view.step_tokens != change.step_tokens:
            action = SetStepTokens(view.id, view.step_tokens, change.step_tokens)
        else:
            continue
        steps.append(Step(action, (), 0.0, decision.gain, options.window_s))
    rejected = tuple(
        Rejected(one.words, RejectReason.WORSE, one.worth) for one in decision.candidates
    )
    return MigrationPlan(
        tuple(steps),
        rejected,
        gap=decision.gain,
        memory=decision.memory,
        reason=decision.reason,
    )


def decide(situation: Situation, options: ElasticOptions) -> Decision:
    """Returns what is to change; pure, and seconds of work where it forecasts."""
    now_s, requests, memory = situation.now_s, situation.requests, situation.memory
    if not requests or not situation.instances:
        return Decision((), (), 0.0, memory, "there were no requests lately")
    if memory is None:
        start_s = requests[0].arrival_s
        memory = LoadMemory(start_s, start_s + options.first_plan_s)
    elif _is_new(requests, memory, now_s, options):
        since_s = now_s - options.recent_s / 2
        memory = LoadMemory(since_s, min(now_s, since_s + options.first_plan_s))
    age_s = now_s - memory.since_s
    is_enough = memory.next_s <= memory.since_s + options.first_plan_s and (
        sum(one.end_s is not None and one.arrival_s >= memory.since_s for one in requests)
        >= options.first_ended
    )
    if now_s < memory.next_s and not is_enough:
        return Decision((), (), 0.0, memory, "the load is what it was")
    is_settled = age_s >= options.settled_s
    after = memory._replace(
        next_s=float("inf") if is_settled else now_s + max(options.first_plan_s, age_s / 2)
    )
    return _Search(situation, memory.since_s, options).best(after)


def _is_new(
    requests: Sequence[ObservedRequest], memory: LoadMemory, now_s: float, options: ElasticOptions
) -> bool:
    """Whether what came in the last seconds is another load than what came before."""
    border_s = now_s - options.recent_s
    if border_s - memory.since_s < options.recent_s:
        return False
    before_s = max(memory.since_s, border_s - options.window_s)
    before = load_stats(requests, before_s, border_s)
    now = load_stats(requests, border_s, now_s)
    return before.differs(now, options.least_change_fraction, options.deviations)


class _Search:
    """Forecasts of every arrangement on the same requests."""

    def __init__(self, situation: Situation, since_s: float, options: ElasticOptions) -> None:
        self._options = options
        self._profile = profiles.load(options.profile)
        self._views = situation.instances
        now_s, requests = situation.now_s, situation.requests
        since_s = max(since_s, now_s - options.window_s)
        lately = [one for one in requests if one.arrival_s >= since_s]
        if len(lately) > options.max_requests:
            since_s = lately[-options.max_requests].arrival_s
        self._num_under_way = sum(one.end_s is None for one in requests)
        self._future = future_of(
            requests,
            since_s,
            now_s,
            options.horizon_s / options.dilation,
            options.max_requests,
            options.dilation,
        )

    def best(self, memory: LoadMemory) -> Decision:
        """All arrangements over a short stretch, then the best of them over a long one."""
        options, views = self._options, self._views
        present = arrangement_of(views)
        others = [
            one
            for one in arrangements(len(views), options.step_sizes)
            if one != present and (options.roles == "any" or one[:3] == present[:3])
        ]
        short = self._future[: self._num_under_way + options.screened_requests]
        if len(others) > options.kept and len(short) < len(self._future):
            others.sort(key=lambda one: -self._forecast(one, short).mean)
            others = others[: options.kept]
        held = self._forecast(present, self._future)
        best, found = present, held
        candidates = [Candidate(str(present), held.mean)]
        for other in others:
            told = self._forecast(other, self._future)
            if told.mean > found.mean:
                best, found = other, told
            candidates.append(Candidate(str(other), told.mean))
        gain = found.mean - held.mean
        if best == present:
            return Decision((), candidates, 0.0, memory, f"{present}: nothing is better")
        # Where no arrangement can do much, a little is much.
        least = options.margin * max(abs(held.mean), options.margin)
        if gain < max(least, options.certainty * chance_of(found, held)):
            reason = f"{best} would be better by {gain:.3f} only"
            return Decision((), candidates, gain, memory, reason)
        return Decision(_changes(best, views, options), candidates, gain, memory, str(best))

    def _forecast(self, wanted: Arrangement, future: Sequence[FutureRequest]) -> Forecast:
        options, views = self._options, self._views
        changed = assign(wanted, views)
        roles: list[tuple[InstanceId, Role, int]] = []
        for view in views:
            role = changed.get(view.id, view.role)
            roles.append((view.id, role, options.feasible(wanted.tokens_of(role))))
        system = System(
            kind="banaserve",
            colocated=len(views),
            handover="store",
            routing=options.routing,
            routing_options=options.routing_options,
        )
        patience_s = max(30.0, 4 * (options.limits.ttft_s or 0.0))
        return forecast(self._profile, system, roles, future, options.limits, patience_s)


def chance_of(one: Forecast, other: Forecast) -> float:
    """How much of a gain may be chance: the deviation of its mean over ten interleaved samples.

    Interleaved, because a queue that grows is no chance.
    """
    gains = [a - b for a, b in zip(one.values, other.values, strict=True)]
    samples = [gains[first::10] for first in range(10)]
    parts = [sum(sample) / len(sample) for sample in samples if sample]
    if len(parts) < 2:
        return 0.0
    mean = sum(parts) / len(parts)
    spread = sum((part - mean) ** 2 for part in parts) / (len(parts) - 1)
    return sqrt(spread / len(parts))


def _changes(
    wanted: Arrangement, views: Sequence[InstanceView], options: ElasticOptions
) -> tuple[Change, ...]:
    """Those who will do both first, then who prefills: so each leg is always served."""
    changed = assign(wanted, views)
    roles = {view.id: changed.get(view.id, view.role) for view in views}
    order = (Role.COLOCATED, Role.PREFILL, Role.DECODE)
    return tuple(
        Change(name, role, options.feasible(wanted.tokens_of(role)))
        for role in order
        for name, own in roles.items()
        if own is role
    )
