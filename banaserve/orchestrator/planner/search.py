"""Search for the best arrangement: forecasts of all candidates on the same requests.

Roles and step sizes are forecast with few requests first, and the best of them with all requests;
then layers and heads that could leave are tried in the best arrangements found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import sqrt

from banaserve.base.types import InstanceView, total_back_pressure
from banaserve.orchestrator.control.move_policies.interface import Rejected, RejectReason
from banaserve.orchestrator.planner.candidates import modules
from banaserve.orchestrator.planner.candidates.arrangement import (
    Arrangement,
    arrangement_of,
    arrangements,
    assign,
    device_kind,
    orders,
)
from banaserve.orchestrator.planner.candidates.planning import (
    Wanted,
    changes_of,
    modelled,
    must_return,
    placements_of,
    steps_of,
)
from banaserve.orchestrator.planner.decision import Decision, LoadMemory, PlannedMove, Situation
from banaserve.orchestrator.planner.forecast_profile import profile_of
from banaserve.orchestrator.planner.forecasting.forecast import (
    Forecast,
    FutureRequest,
    ServiceLimits,
    forecast,
    future_of,
    slowdown,
)
from banaserve.orchestrator.planner.options import ElasticOptions
from banaserve.sim.system import System

_MOVED_FROM = 3
"""Number of best arrangements in which moves of modules are considered."""

_MOVES_KEPT = 2

_AS_FAST = 0.02
"""Slowdown that a forecast cannot distinguish from 0."""

_MOST_DOUBT = 0.3
"""Maximum relative doubt of a rate: a few requests in bursts say almost nothing about it."""

_LEAST_WORTH = 0.3
"""Mean worth of a request below which the least gain does not become smaller: in an overload,
chance easily exceeds a share of a worth near 0."""

_LEAST_SCREENED = 100
"""Least number of requests of a screening: fewer say little, and all are quickly forecast."""

_LOOKS_FOR_HOME = 2
"""Number of consecutive checks without a gain of modules away before they come home."""


class Search:
    """Forecasts of every arrangement on the same requests."""

    def __init__(self, situation: Situation, since_s: float, options: ElasticOptions) -> None:
        self._options = options
        self._looks_at_latency = options.limits == ServiceLimits()
        self._profile = profile_of(options, situation.instances)
        self._views = modelled(
            _seen(situation.instances, options), self._profile.facts, options.dilation
        )
        self._by_id = {view.id: view for view in self._views}
        self._far = {view.id: view.far for view in self._views if view.far}
        self._orders = orders(self._views) if options.roles == "any" else ((),)
        self._present = arrangement_of(self._views)
        # The forecast's store has no size limit: there, more prefill always shortens the queue.
        is_pressed = total_back_pressure(situation.instances) is not None
        self._most_prefill = self._present.num_prefill if is_pressed else len(self._views)
        self._away = placements_of(self._views)
        self._bounds: list[Rejected] = []
        self._system = System(
            kind="banaserve",
            colocated=len(self._views),
            handover="store",
            routing=options.routing,
            routing_options=options.routing_options,
            attention_fraction=None,
            devices={view.id: kind for view in self._views if (kind := device_kind(view))},
        )
        # The time of a module on another kind of device is not modelled here.
        self._kinds = () if self._system.devices else options.kinds
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
        seen = [one for one in requests if one.arrival_s >= since_s]
        self._work_doubt = work_doubt(
            [one.arrival_s for one in seen],
            [one.prompt_tokens - one.cached_tokens for one in seen],
        )

    def best(self) -> Decision:
        """Return the decision for the best arrangement, forecast as the module describes.

        All arrangements are forecast with few requests, the best of them with all requests; then
        moves of modules are tried in the best arrangements found.
        """
        stay = Wanted(self._present)
        held = self._told(stay)
        arranged = self._arranged()
        others = self._screened(arranged)
        if self._looks_at_latency:
            plain = [one for one in arranged if is_plain(one.arrangement)]
            others = list(dict.fromkeys((*others, *plain)))
        if self._away:
            others = list(dict.fromkeys((Wanted(self._present, self._away), *others)))
        found = {stay: held} | {other: self._told(other) for other in others}
        found |= self._moved(found)
        return self._chosen(stay, found)

    def homeward(self, num_for_home: int) -> Decision:
        """Decide only whether modules away come home, which two consecutive checks must find.

        Modules should come home if the bound of their gain, by which modules also leave, is at most
        half of the least gain of any change, and the forecast loses nothing without them away. In
        an overload the forecast alone would find no gain in anything; the bound shows that hosts
        lack time and memory.

        Args:
            num_for_home: Number of consecutive checks so far by which modules should come home.
        """
        if not self._away:
            return Decision((), (), 0.0, None, "the load is what it was")
        stay, home = Wanted(self._present), Wanted(self._present, self._away)
        held, back = self._told(stay), self._told(home, watch=True)
        gain = back.mean - held.mean
        moves = [PlannedMove(one.host, one.guest, one.module) for one in self._away]
        bound = modules.bound_of(moves, back.use, self._by_id, (), self._profile)
        shown = (_shown(stay, held.mean), _shown(home, back.mean))
        if bound > self._options.margin / 2 or gain < -least_gain(held.mean, self._options) / 2:
            return Decision((), shown, 0.0, None, f"{stay}: modules may bring {bound:.3f}")
        if num_for_home + 1 < _LOOKS_FOR_HOME:
            memory = LoadMemory(0.0, 0.0, num_for_home=num_for_home + 1)
            return Decision((), shown, gain, memory, f"{home}, if it stays so")
        return Decision((), shown, gain, None, str(home), self._away)

    def _chosen(self, stay: Wanted, found: dict[Wanted, Forecast]) -> Decision:
        """Return the decision for the best of ``found`` if it is clearly better than ``stay``."""
        options, held = self._options, found[stay]
        least = least_gain(held.mean, options)
        slower = self._slower(found, stay)
        weight = options.slowdown_weight
        means = {one: told.mean - weight * slower[one] for one, told in found.items()}
        shown = [_shown(one, mean) for one, mean in means.items()]
        shown += self._bounds
        worth = {one: mean - self._handicap(one, least) for one, mean in means.items()}
        best = max(found, key=lambda one: worth[one])
        gain = means[best] - means[stay]
        reason = str(best)
        home = Wanted(self._present, self._away)
        doubt = ""
        if best not in (stay, home) and not self._is_back(best):
            if gain < max(least, options.certainty * chance_of(found[best], held, self._future)):
                doubt = f"{best} would be better by {gain:.3f} only"
            elif self._gain_if_denser(best, stay) < (-gain if best.moves else -least / 2):
                doubt = f"{best} would lose more with a little more load"
        if doubt:
            reason = doubt
            best = home if worth.get(home, worth[stay]) > worth[stay] else stay
        elif best == stay:
            reason = f"{stay}: nothing is better"
        if best == stay:
            return Decision((), shown, max(0.0, gain), None, reason)
        if best == home:
            return Decision((), shown, max(0.0, gain), None, str(home), self._away)
        return Decision(
            changes_of(best.arrangement, self._views, options.feasible, best.order),
            shown,
            max(0.0, gain),
            None,
            reason,
            best.returns,
            best.moves,
        )

    def _slower(self, found: Mapping[Wanted, Forecast], stay: Wanted) -> dict[Wanted, float]:
        """Return how much slower each candidate works than the fastest, since ``stay`` may be slow.

        The fastest is taken among candidates without moves: else modules would come and go for
        speed alone. Speed counts without limits, too: a mean of logarithms favours an arrangement
        that serves some requests at once and others never.
        """
        lost = {one: slowdown(told, found[stay]) for one, told in found.items()}
        fastest = min(value for one, value in lost.items() if not one.moves)
        return {one: max(0.0, value - fastest - _AS_FAST) for one, value in lost.items()}

    def _gain_if_denser(self, best: Wanted, stay: Wanted) -> float:
        """Return the gain of ``best`` at a rate higher by ``certainty`` deviations of the doubt.

        Near saturation, a little more load is much worse, and some arrangements have less reserve.
        A gain at the observed rate does not make up for that loss: an arrangement in which hundreds
        of requests wait is hard to leave, since no other one is predicted to be better then.
        With modules away it does, since they come home as soon as they bring nothing.
        """
        future = denser(self._future, self._options.certainty * self._work_doubt)
        found = {one: self._forecast(one, future) for one in (best, stay)}
        slower = self._slower(found, stay)
        lost = self._options.slowdown_weight * (slower[best] - slower[stay])
        return found[best].mean - found[stay].mean - lost

    def _is_back(self, one: Wanted) -> bool:
        """Return whether ``one`` goes back to plain engines, which needs no gain without limits."""
        back = is_plain(one.arrangement) and not is_plain(self._present)
        return self._looks_at_latency and back

    def _handicap(self, one: Wanted, least: float) -> float:
        """Return the worth that ``one`` must gain for its modules away and its separate roles.

        Modules that leave must gain more than modules that stay away, so that none oscillates.
        Without limits, instances that do not all do both must gain as much as modules that stay
        away.
        """
        is_apart = self._looks_at_latency and not is_plain(one.arrangement)
        apart = least / 2 if is_apart else 0.0
        if one.moves:
            return least + apart
        return apart + (least / 2 if len(one.returns) < len(self._away) else 0.0)

    def _arranged(self) -> list[Wanted]:
        """Return all candidates but the present state.

        Each arrangement comes once with modules away as now, as far as roles do not change, and
        once with all modules at home. While prefill waits for room in the store, it gets no more
        instances: it waits for decode.
        """
        options, views = self._options, self._views
        found: list[Wanted] = []
        for one in arrangements(len(views), options.step_sizes, self._present):
            if one.num_prefill > self._most_prefill:
                continue
            if one == self._present:
                found.append(Wanted(one, self._away))
                for order in self._orders:
                    if order and assign(one, views, order):
                        found.append(Wanted(one, self._away, (), order))
            elif options.roles == "any" or one[:3] == self._present[:3]:
                for order in self._orders:
                    kept = must_return(one, views, self._away, order)
                    found += [Wanted(one, kept, (), order), Wanted(one, self._away, (), order)]
        return [one for one in dict.fromkeys(found) if one != Wanted(self._present)]

    def _screened(self, others: list[Wanted]) -> list[Wanted]:
        """Return the best of ``others`` by forecasts with the first requests.

        If there are many candidates, roles are compared first, with one step size and half of these
        requests; and at most half of the arriving requests are used, since with few arrivals it
        would be all of them.
        """
        options = self._options
        is_coarse = len(others) >= options.coarse
        num_screened = options.screened_requests
        if is_coarse:
            num_arriving = len(self._future) - self._num_under_way
            num_screened = min(num_screened, max(_LEAST_SCREENED, num_arriving // 2))
        short = self._future[: self._num_under_way + num_screened]
        if len(others) <= options.kept or len(short) == len(self._future):
            return others

        def best_of(some: Iterable[Wanted], future: Sequence[FutureRequest]) -> list[Wanted]:
            found = sorted(some, key=lambda one: -self._forecast(one, future).mean)
            return found[: options.kept]

        if is_coarse:
            by_roles: dict[tuple[object, ...], list[Wanted]] = {}
            for one in others:
                by_roles.setdefault((*one.arrangement[:3], one.order), []).append(one)
            middle = [sizes[len(sizes) // 2] for sizes in by_roles.values()]
            half = short[: self._num_under_way + num_screened // 2]
            roles = {(*one.arrangement[:3], one.order) for one in best_of(middle, half)}
            others = [one for one in others if (*one.arrangement[:3], one.order) in roles]
        return best_of(others, short)

    def _moved(self, found: dict[Wanted, Forecast]) -> dict[Wanted, Forecast]:
        """Return forecasts of the best arrangements with moves that the cost model recommends."""
        options = self._options
        bounded: list[tuple[float, Wanted]] = []
        for one in sorted(found, key=lambda other: -found[other].mean)[:_MOVED_FROM]:
            gone = set(one.returns)
            kept = [placement for placement in self._away if placement not in gone]
            for some in modules.candidates(
                self._kinds, found[one].use, self._by_id, kept, self._profile
            ):
                bounded.append((some.bound, one._replace(moves=some.moves)))
        bounded.sort(key=lambda pair: -pair[0])
        worth_it = [pair for pair in bounded if pair[0] > options.margin][: options.tried_moves]
        for bound, one in bounded:
            if (bound, one) not in worth_it:
                self._bounds.append(Rejected(str(one), RejectReason.NO_BENEFIT, bound))
        if not worth_it:
            return {}
        short = self._future[: self._num_under_way + options.screened_requests]
        wanted = [one for _, one in worth_it]
        wanted.sort(key=lambda one: -self._forecast(one, short).mean)
        return {one: self._told(one) for one in wanted[:_MOVES_KEPT]}

    def _told(self, wanted: Wanted, *, watch: bool = False) -> Forecast:
        return self._forecast(wanted, self._future, watch=watch or bool(self._kinds))

    def _forecast(
        self, wanted: Wanted, future: Sequence[FutureRequest], *, watch: bool = False
    ) -> Forecast:
        """Return the forecast of a plan for ``wanted``; the present state needs no steps."""
        options = self._options
        views = {
            view.id: replace(view, step_tokens=options.feasible(self._present.tokens_of(view.role)))
            for view in self._views
        }
        changes = changes_of(wanted.arrangement, self._views, options.feasible, wanted.order)
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
            far=self._far,
        )


def _shown(wanted: Wanted, worth: float) -> Rejected:
    """Return a candidate with the mean worth of a request by its forecast."""
    return Rejected(str(wanted), RejectReason.WORSE, worth)


def is_plain(arrangement: Arrangement) -> bool:
    """Return whether all instances do both, as plain engines behind a balancer do."""
    return arrangement.num_both == arrangement.size


def least_gain(mean: float, options: ElasticOptions) -> float:
    """Return the least gain for which anything changes if the mean worth of a request is ``mean``.

    With limits, it is a share of that worth, or of ``_LEAST_WORTH`` if the worth is smaller.
    Without limits, worth is a logarithm of time, so a difference already is a share of the time:
    the required gain does not depend on whether a request takes one second or ten.
    """
    if options.limits == ServiceLimits():
        return options.margin
    return options.margin * max(abs(mean), _LEAST_WORTH)


def _seen(views: Sequence[InstanceView], options: ElasticOptions) -> Sequence[InstanceView]:
    """Return the instances with the devices that the options take them to have."""
    if options.devices == "own":
        return views
    return [
        replace(view, facts=replace(view.facts, profile="", speed=1.0)) if view.facts else view
        for view in views
    ]


def work_doubt(arrivals_s: Sequence[float], prompt_tokens: Sequence[int]) -> float:
    """Return the relative standard deviation of the prompt tokens that arrive per second.

    For a renewal process with independent lengths it is the root of the sum of the squared
    coefficients of variation of the gaps between arrivals and of the lengths, divided by the square
    root of the number of gaps; at most ``_MOST_DOUBT``.
    """
    gaps = [b - a for a, b in pairwise(arrivals_s)]
    if not gaps or sum(gaps) <= 0:
        return _MOST_DOUBT
    squares = _squared_variation(gaps) + _squared_variation(prompt_tokens)
    return min(_MOST_DOUBT, sqrt(squares / len(gaps)))


def _squared_variation(values: Sequence[float]) -> float:
    """Return the variance of ``values`` divided by the square of their mean; 0 for a mean of 0."""
    mean = sum(values) / len(values)
    if mean <= 0:
        return 0.0
    return sum((one - mean) ** 2 for one in values) / len(values) / mean**2


def denser(future: Sequence[FutureRequest], more: float) -> list[FutureRequest]:
    """Return the same requests, arriving at a rate higher by the share ``more``."""
    return [one._replace(at_s=one.at_s / (1 + more)) for one in future]


def chance_of(one: Forecast, other: Forecast, future: Sequence[FutureRequest]) -> float:
    """Return the standard deviation of the mean gain by chance, from ten interleaved samples.

    The samples are interleaved because the growth of a queue is not chance. A request that arrives
    repeatedly in the forecast was observed once, so all of its arrivals are in one sample: else the
    requests of a few seconds would seem as certain as those of a minute.
    """
    samples: list[list[float]] = [[] for _ in range(10)]
    for told, a, b in zip(future, one.values, other.values, strict=True):
        samples[told.source % 10].append(a - b)
    parts = [sum(sample) / len(sample) for sample in samples if sample]
    if len(parts) < 2:
        return 0.0
    mean = sum(parts) / len(parts)
    spread = sum((part - mean) ** 2 for part in parts) / (len(parts) - 1)
    return sqrt(spread / len(parts))
