"""Elastic policy: the arrangement that serves best what has come lately, by forecast.

It looks at the load at every turn and plans when there is reason to: early and at ever longer
distances while a load is new, since evidence grows, and anew when the load is another one. What
runs is kept unless another arrangement is clearly better on the same requests. Roles, step sizes
and modules away are one search: a plan takes home what stands in the way of a switch, and a module
stays away only as long as that brings clearly more than having it at home.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, ClassVar, NamedTuple

from banaserve.costs import profile as profiles
from banaserve.elastic import modules
from banaserve.elastic.arrangement import arrangement_of, arrangements
from banaserve.elastic.forecast import (
    Forecast,
    FutureRequest,
    ServiceLimits,
    forecast,
    future_of,
)
from banaserve.elastic.load import load_stats
from banaserve.elastic.planning import (
    Change,
    PlannedMove,
    Wanted,
    changes_of,
    modelled,
    must_return,
    placements_of,
    steps_of,
)
from banaserve.errors import UserError
from banaserve.names import check_known
from banaserve.orchestrator.migration.interface import MigrationPlan, Rejected, RejectReason
from banaserve.orchestrator.routing import registry as routings
from banaserve.sim.system import System
from banaserve.types import (
    ClusterView,
    InstanceView,
    ModulePlacement,
    ObservedRequest,
    SetStepTokens,
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
        modules: What may leave its instance: ``layers``, ``heads``, or both, separated by a comma;
            ``none`` is nothing.
        routing: Policy that routes in the forecast: the one that serves.
        first_plan_s: A load's first plan comes when it has lasted this long,
        first_ended: or when so many of its requests have ended, so that their lengths are known.
        settled_s: After this a load is known; it is planned for again when it changes.
        recheck_s: After this it is looked again whether modules that are away still bring anything
            under a known load; and, after longer and longer, whether a plan has come about.
        window_s: Requests of at most so long ago are forecast.
        horizon_s: So far a forecast looks.
        max_requests: That arrive in a forecast at most.
        screened_requests: Of those, the first, which every arrangement is forecast for.
        kept: Arrangements that are forecast for all of them, the best for the first ones.
        coarse: From so many arrangements on, roles are looked at in steps of one size first.
        tried_moves: Moves of modules that are forecast for the first requests at most, those by
            which the cost model says that hosts could gain most.
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
    modules: str = "layers,heads"
    routing: str = "load_aware"
    first_plan_s: float = 4.0
    first_ended: int = 20
    settled_s: float = 110.0
    recheck_s: float = 15.0
    window_s: float = 60.0
    horizon_s: float = 40.0
    max_requests: int = 3000
    screened_requests: int = 500
    kept: int = 7
    coarse: int = 40
    tried_moves: int = 8
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
            "recheck_s",
            "window_s",
            "max_requests",
            "recent_s",
            "dilation",
        ):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}: give more than 0")
        if self.roles not in ("any", "fixed"):
            raise UserError(f"roles is {self.roles!r}: give any or fixed")
        if self.modules != "none" and not set(self.kinds) <= set(modules.KINDS):
            raise UserError(f"modules is {self.modules!r}: give {', '.join(modules.KINDS)} or none")
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
    def kinds(self) -> tuple[str, ...]:
        """Kinds of modules that may leave."""
        if self.modules == "none":
            return ()
        return tuple(dict.fromkeys(one.strip() for one in self.modules.split(",")))

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
        is_settled: It is known.
        wanted: What the instances were to be by the last plan.
        num_for_home: Looks in a row at which modules away would better be at home.
    """

    since_s: float
    next_s: float
    is_settled: bool = False
    wanted: tuple[Change, ...] = ()
    num_for_home: int = 0


class Situation(NamedTuple):
    """What a decision is made from; it passes between processes as it is.

    Attributes:
        is_changing: Steps of an earlier plan are under way.
    """

    now_s: float
    instances: Sequence[InstanceView]
    requests: Sequence[ObservedRequest]
    memory: LoadMemory | None
    is_changing: bool = False


class Candidate(NamedTuple):
    """An arrangement that was looked at, in words.

    Attributes:
        worth: Mean of its requests by forecast, or, where it was not worth one, the bound of what
            it brings.
        is_forecast: Which of both.
    """

    words: str
    worth: float
    is_forecast: bool = True


class Decision(NamedTuple):
    """What is to change, in this order, and why not more.

    Attributes:
        gain: By how much the worth of a request rises.
        returns: Modules that come home before ``changes``.
        moves: Modules that leave after them.
    """

    changes: Sequence[Change]
    candidates: Sequence[Candidate]
    gain: float
    memory: LoadMemory | None
    reason: str
    returns: Sequence[ModulePlacement] = ()
    moves: Sequence[PlannedMove] = ()


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
        return Situation(cluster.now_s, ready, cluster.requests, memory, bool(cluster.under_way))


def plan_of(decision: Decision, cluster: ClusterView, options: ElasticOptions) -> MigrationPlan:
    """Returns ``decision`` as steps for ``cluster``; what is so already needs none.

    An instance that is changing still is left alone: a second step would be refused.
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
        profiles.load(options.profile) if has_modules else None,
        options.dilation,
        options.window_s,
    )
    rejected = tuple(
        Rejected(
            one.words,
            RejectReason.WORSE if one.is_forecast else RejectReason.NO_BENEFIT,
            one.worth,
        )
        for one in decision.candidates
    )
    return MigrationPlan(
        steps,
        rejected,
        gap=decision.gain,
        memory=decision.memory,
        reason=decision.reason,
        is_ordered=has_modules,
    )


def decide(situation: Situation, options: ElasticOptions) -> Decision:
    """Returns what is to change; pure, and seconds of work where it forecasts."""
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
    is_enough = memory.next_s <= memory.since_s + options.first_plan_s and (
        sum(one.end_s is not None and one.arrival_s >= memory.since_s for one in requests)
        >= options.first_ended
    )
    if now_s < memory.next_s and not is_enough:
        return Decision((), (), 0.0, memory, "the load is what it was")
    is_known = memory.is_settled and not _is_missing(memory.wanted, situation.instances)
    search = _Search(situation, memory.since_s, options)
    decision = search.homeward(memory.num_for_home) if is_known else search.best()
    return decision._replace(memory=_after(decision, memory, situation, options))


def _after(
    decision: Decision, memory: LoadMemory, situation: Situation, options: ElasticOptions
) -> LoadMemory:
    """When to decide again."""
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
    return LoadMemory(memory.since_s, next_s, True, wanted, num_for_home)


def _is_missing(wanted: Sequence[Change], views: Iterable[InstanceView]) -> bool:
    """Whether an instance has not got the role that it was to have."""
    roles = {view.id: view.role for view in views}
    return any(roles.get(one.instance, one.role) is not one.role for one in wanted)


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


_MOVED_FROM = 3
"""Arrangements from which modules are looked at."""

_MOVES_KEPT = 2

_LOOKS_FOR_HOME = 2
"""In a row, at which modules away cannot bring anything."""


class _Search:
    """Forecasts of every arrangement on the same requests."""

    def __init__(self, situation: Situation, since_s: float, options: ElasticOptions) -> None:
        self._options = options
        self._profile = profiles.load(options.profile)
        self._views = modelled(situation.instances, self._profile.facts)
        self._present = arrangement_of(self._views)
        self._away = placements_of(self._views)
        self._bounds: list[Candidate] = []
        self._system = System(
            kind="banaserve",
            colocated=len(self._views),
            handover="store",
            routing=options.routing,
            routing_options=options.routing_options,
            overlap_fraction=None,
            attention_fraction=None,
        )
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

    def best(self) -> Decision:
        """All arrangements over a short stretch, then the best of them over a long one.

        Then modules that could leave, in the best arrangements found.
        """
        stay = Wanted(self._present)
        held = self._told(stay)
        others = self._screened(self._arranged())
        if self._away:
            others = list(dict.fromkeys((Wanted(self._present, self._away), *others)))
        found = {stay: held} | {other: self._told(other) for other in others}
        found |= self._moved(found)
        return self._chosen(stay, found)

    def homeward(self, num_for_home: int) -> Decision:
        """Only whether modules that are away should come home: two looks must say so in a row.

        They should where they could not bring half of what any change must, by the same bound for
        which modules leave, and the forecast loses nothing by it. In an overload the forecast
        alone would say that nothing brings anything; the bound says that hosts lack time and room.

        Args:
            num_for_home: Looks that have said so by now.
        """
        if not self._away:
            return Decision((), (), 0.0, None, "the load is what it was")
        stay, home = Wanted(self._present), Wanted(self._present, self._away)
        held, back = self._told(stay), self._told(home, watch=True)
        gain = back.mean - held.mean
        moves = [modules.PlannedMove(one.host, one.guest, one.module) for one in self._away]
        bound = modules.bound_of(moves, back.use, (), self._profile)
        shown = (Candidate(str(stay), held.mean), Candidate(str(home), back.mean))
        if bound > self._options.margin / 2 or gain < -self._least(held) / 2:
            return Decision((), shown, 0.0, None, f"{stay}: modules may bring {bound:.3f}")
        if num_for_home + 1 < _LOOKS_FOR_HOME:
            memory = LoadMemory(0.0, 0.0, num_for_home=num_for_home + 1)
            return Decision((), shown, gain, memory, f"{home}, if it stays so")
        return Decision((), shown, gain, None, str(home), self._away)

    def _chosen(self, stay: Wanted, found: dict[Wanted, Forecast]) -> Decision:
        """The best of ``found``, if that is clearly better than what there is."""
        options, held = self._options, found[stay]
        least = self._least(held)
        shown = [Candidate(str(one), told.mean) for one, told in found.items()]
        shown += self._bounds
        worth = {one: told.mean - self._handicap(one, least) for one, told in found.items()}
        best = max(found, key=lambda one: worth[one])
        gain = found[best].mean - held.mean
        reason = str(best)
        home = Wanted(self._present, self._away)
        if best not in (stay, home) and gain < max(
            least, options.certainty * chance_of(found[best], held)
        ):
            reason = f"{best} would be better by {gain:.3f} only"
            best = home if worth.get(home, worth[stay]) > worth[stay] else stay
        elif best == stay:
            reason = f"{stay}: nothing is better"
        if best == stay:
            return Decision((), shown, max(0.0, gain), None, reason)
        if best == home:
            return Decision((), shown, max(0.0, gain), None, str(home), self._away)
        return Decision(
            changes_of(best.arrangement, self._views, options.feasible),
            shown,
            gain,
            None,
            reason,
            best.returns,
            best.moves,
        )

    def _least(self, held: Forecast) -> float:
        """Least gain for which anything changes; where no arrangement can do much, it is much."""
        return self._options.margin * max(abs(held.mean), self._options.margin)

    def _handicap(self, one: Wanted, least: float) -> float:
        """What modules away must bring: to leave more than to stay away, so that none goes and
        comes."""
        if one.moves:
            return least
        return least / 2 if len(one.returns) < len(self._away) else 0.0

    def _arranged(self) -> list[Wanted]:
        """Everything but what there is, each with modules away as now and with all at home."""
        options, views = self._options, self._views
        found: list[Wanted] = []
        for one in arrangements(len(views), options.step_sizes):
            if one == self._present:
                found.append(Wanted(one, self._away))
            elif options.roles == "any" or one[:3] == self._present[:3]:
                kept = must_return(one, views, self._away)
                found += [Wanted(one, kept), Wanted(one, self._away)]
        return [one for one in dict.fromkeys(found) if one != Wanted(self._present)]

    def _screened(self, others: list[Wanted]) -> list[Wanted]:
        """The best of ``others`` over a short stretch.

        Where they are many, their roles first, in steps of one size and over half of it.
        """
        options = self._options
        short = self._future[: self._num_under_way + options.screened_requests]
        if len(others) <= options.kept or len(short) == len(self._future):
            return others

        def best_of(some: Iterable[Wanted], future: Sequence[FutureRequest]) -> list[Wanted]:
            found = sorted(some, key=lambda one: -self._forecast(one, future).mean)
            return found[: options.kept]

        if len(others) >= options.coarse:
            by_roles: dict[tuple[int, ...], list[Wanted]] = {}
            for one in others:
                by_roles.setdefault(one.arrangement[:3], []).append(one)
            middle = [sizes[len(sizes) // 2] for sizes in by_roles.values()]
            half = short[: self._num_under_way + options.screened_requests // 2]
            roles = {one.arrangement[:3] for one in best_of(middle, half)}
            others = [one for one in others if one.arrangement[:3] in roles]
        return best_of(others, short)

    def _moved(self, found: dict[Wanted, Forecast]) -> dict[Wanted, Forecast]:
        """The best arrangements found with modules moved, those that the cost model speaks for."""
        options = self._options
        bounded: list[tuple[float, Wanted]] = []
        for one in sorted(found, key=lambda other: -found[other].mean)[:_MOVED_FROM]:
            gone = set(one.returns)
            kept = [placement for placement in self._away if placement not in gone]
            views = {view.id: view for view in self._views}
            for some in modules.candidates(
                options.kinds, found[one].use, views, kept, self._profile
            ):
                bounded.append((some.bound, one._replace(moves=some.moves)))
        bounded.sort(key=lambda pair: -pair[0])
        worth_it = [pair for pair in bounded if pair[0] > options.margin][: options.tried_moves]
        for bound, one in bounded:
            if (bound, one) not in worth_it:
                self._bounds.append(Candidate(str(one), bound, is_forecast=False))
        if not worth_it:
            return {}
        short = self._future[: self._num_under_way + options.screened_requests]
        wanted = [one for _, one in worth_it]
        wanted.sort(key=lambda one: -self._forecast(one, short).mean)
        return {one: self._told(one) for one in wanted[:_MOVES_KEPT]}

    def _told(self, wanted: Wanted, *, watch: bool = False) -> Forecast:
        return self._forecast(wanted, self._future, watch=watch or bool(self._options.kinds))

    def _forecast(
        self, wanted: Wanted, future: Sequence[FutureRequest], *, watch: bool = False
    ) -> Forecast:
        """What comes of a plan for ``wanted``, that of what there is being none."""
        options = self._options
        views = {
            view.id: replace(view, step_tokens=options.feasible(self._present.tokens_of(view.role)))
            for view in self._views
        }
        changes = changes_of(wanted.arrangement, self._views, options.feasible)
        steps = steps_of(
            Decision(changes, (), 0.0, None, "", wanted.returns, wanted.moves),
            views,
            self._profile,
            1.0,
            options.window_s,
        )
        roles = [(view.id, view.role, view.step_tokens) for view in views.values()]

        patience_s = max(30.0, 4 * (options.limits.ttft_s or 0.0))
        return forecast(
            self._profile,
            self._system,
            roles,
            future,
            options.limits,
            patience_s,
            steps,
            self._away,
            watch=watch,
        )


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
