"""Search for the best arrangement: forecasts of all candidates on the same requests.

Roles and step sizes over a short stretch first, the best of them over a long one, then layers and
heads that could leave in the best arrangements found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import sqrt

from banaserve.elastic import modules
from banaserve.elastic.arrangement import (
    Arrangement,
    arrangement_of,
    arrangements,
    assign,
    device_of,
    orders,
)
from banaserve.elastic.decision import Candidate, Decision, LoadMemory, Situation
from banaserve.elastic.forecast import (
    Forecast,
    FutureRequest,
    ServiceLimits,
    forecast,
    future_of,
)
from banaserve.elastic.learnt_times import profile_of
from banaserve.elastic.options import ElasticOptions
from banaserve.elastic.planning import (
    Wanted,
    changes_of,
    modelled,
    must_return,
    placements_of,
    steps_of,
)
from banaserve.elastic.slowdown import slowdown
from banaserve.sim.system import System
from banaserve.types import InstanceId, InstanceView, total_back_pressure

_MOVED_FROM = 3
"""Arrangements from which modules are looked at."""

_MOVES_KEPT = 2

_AS_FAST = 0.02
"""Slowdown that a forecast cannot tell from none."""

_MOST_DOUBT = 0.3
"""Of a rate: a few requests in bursts say next to nothing of it."""

_LEAST_WORTH = 0.3
"""Of a request, in the mean: where everything is worth less, a gain has to be as large as here. In
an overload a share of next to nothing is soon reached by chance."""

_LEAST_SCREENED = 100
"""Requests; of fewer, a part says little, and all of them are soon forecast."""

_LOOKS_FOR_HOME = 2
"""In a row, at which modules away cannot bring anything."""


class Search:
    """Forecasts of every arrangement on the same requests."""

    def __init__(self, situation: Situation, since_s: float, options: ElasticOptions) -> None:
        self._options = options
        self._profile = profile_of(options, situation.instances)
        self._views = modelled(
            _seen(situation.instances, options), self._profile.facts, options.dilation
        )
        self._far = {view.id: view.far for view in self._views if view.far}
        self._orders = orders(self._views) if options.roles == "any" else ((),)
        self._present = arrangement_of(self._views)
        # The forecast's store has no end: in it more prefill always shortens a queue of prompts.
        is_pressed = total_back_pressure(situation.instances) is not None
        self._most_prefill = self._present.num_prefill if is_pressed else len(self._views)
        self._away = placements_of(self._views)
        self._bounds: list[Candidate] = []
        self._system = System(
            kind="banaserve",
            colocated=len(self._views),
            handover="store",
            routing=options.routing,
            routing_options=options.routing_options,
            attention_fraction=None,
            devices={view.id: kind for view in self._views if (kind := device_of(view))},
        )
        # What a module would take of another device is not modelled here.
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
        arrivals_s = [one.arrival_s for one in requests if one.arrival_s >= since_s]
        self._rate_doubt = rate_doubt(arrivals_s)

    def best(self) -> Decision:
        """All arrangements over a short stretch, then the best of them over a long one.

        Then modules that could leave, in the best arrangements found.
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
        bound = modules.bound_of(moves, back.use, self._by_id(), (), self._profile)
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
        slower = self._slower(found, stay)
        weight = options.slowdown_weight
        means = {one: told.mean - weight * slower[one] for one, told in found.items()}
        shown = [Candidate(str(one), mean) for one, mean in means.items()]
        shown += self._bounds
        worth = {one: mean - self._handicap(one, least) for one, mean in means.items()}
        best = max(found, key=lambda one: worth[one])
        gain = means[best] - means[stay]
        reason = str(best)
        home = Wanted(self._present, self._away)
        doubt = ""
        if best not in (stay, home) and not self._is_back(best):
            if gain < max(least, options.certainty * chance_of(found[best], held)):
                doubt = f"{best} would be better by {gain:.3f} only"
            elif gain + self._gain_if_denser(best, stay) < 0:
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
        """By how much each works slower than the fastest: what is there now may be slow itself.

        The fastest with modules as they are: else some would go and come for speed alone. Without
        limits, too: a mean of logarithms likes best who serves some at once and others never.
        """
        lost = {one: slowdown(told, found[stay]) for one, told in found.items()}
        fastest = min(value for one, value in lost.items() if not one.moves)
        return {one: max(0.0, value - fastest - _AS_FAST) for one, value in lost.items()}

    def _gain_if_denser(self, best: Wanted, stay: Wanted) -> float:
        """What ``best`` brings at a rate that may as well be the true one.

        Near saturation a little more load is much worse, and some arrangements have less room.
        """
        future = denser(self._future, self._rate_doubt)
        found = {one: self._forecast(one, future) for one in (best, stay)}
        slower = self._slower(found, stay)
        lost = self._options.slowdown_weight * (slower[best] - slower[stay])
        return found[best].mean - found[stay].mean - lost

    @property
    def _looks_at_latency(self) -> bool:
        return self._options.limits == ServiceLimits()

    def _is_back(self, one: Wanted) -> bool:
        """Whether it goes back to what plain engines do, which needs no gain without limits."""
        back = is_plain(one.arrangement) and not is_plain(self._present)
        return self._looks_at_latency and back

    def _least(self, held: Forecast) -> float:
        return least_gain(held.mean, self._options)

    def _handicap(self, one: Wanted, least: float) -> float:
        """What modules away must bring: to leave more than to stay away, so that none goes and
        comes. Without limits instances that do not do both have to bring as much to stay so."""
        is_apart = self._looks_at_latency and not is_plain(one.arrangement)
        apart = least / 2 if is_apart else 0.0
        if one.moves:
            return least + apart
        return apart + (least / 2 if len(one.returns) < len(self._away) else 0.0)

    def _arranged(self) -> list[Wanted]:
        """Everything but what there is, each with modules away as now and with all at home.

        Prefill that waits for room in the store gets no more instances: it waits for decode.
        """
        options, views = self._options, self._views
        found: list[Wanted] = []
        for one in arrangements(len(views), options.step_sizes):
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
        """The best of ``others`` over a short stretch.

        Where they are many, their roles first, in steps of one size and over half of it; and the
        stretch is half of what comes at most, since with few requests it would be all of it.
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
        """The best arrangements found with modules moved, those that the cost model speaks for."""
        options = self._options
        bounded: list[tuple[float, Wanted]] = []
        for one in sorted(found, key=lambda other: -found[other].mean)[:_MOVED_FROM]:
            gone = set(one.returns)
            kept = [placement for placement in self._away if placement not in gone]
            for some in modules.candidates(
                self._kinds, found[one].use, self._by_id(), kept, self._profile
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

    def _by_id(self) -> dict[InstanceId, InstanceView]:
        return {view.id: view for view in self._views}

    def _told(self, wanted: Wanted, *, watch: bool = False) -> Forecast:
        return self._forecast(wanted, self._future, watch=watch or bool(self._kinds))

    def _forecast(
        self, wanted: Wanted, future: Sequence[FutureRequest], *, watch: bool = False
    ) -> Forecast:
        """What comes of a plan for ``wanted``, that of what there is being none."""
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


def is_plain(arrangement: Arrangement) -> bool:
    """Whether all instances do both, as plain engines behind a balancer do."""
    return arrangement.num_both == arrangement.size


def least_gain(mean: float, options: ElasticOptions) -> float:
    """Returns the least gain for which anything changes where the worth of a request is ``mean``.

    With limits a share of that worth, or of ``_LEAST_WORTH`` where no arrangement can do much.
    Without them worth is a logarithm of time, in which a difference is a share of the time already:
    what a request takes, a second or ten, says nothing of how sure a gain has to be.
    """
    if options.limits == ServiceLimits():
        return options.margin
    return options.margin * max(abs(mean), _LEAST_WORTH)


def _seen(views: Sequence[InstanceView], options: ElasticOptions) -> Sequence[InstanceView]:
    """Instances as the options say that they are to be taken."""
    if options.devices == "own":
        return views
    return [
        replace(view, facts=replace(view.facts, profile="", speed=1.0)) if view.facts else view
        for view in views
    ]


def rate_doubt(arrivals_s: Sequence[float]) -> float:
    """How far off the rate of these arrivals may be, as a share of it: one standard deviation.

    Of a renewal process that is the variation of its gaps over the square root of their number.
    """
    gaps = [b - a for a, b in pairwise(arrivals_s)]
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    if mean <= 0:
        return _MOST_DOUBT
    variation = sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
    return min(_MOST_DOUBT, variation / sqrt(len(gaps)))


def denser(future: Sequence[FutureRequest], more: float) -> list[FutureRequest]:
    """The same requests, arriving at a rate that is higher by this share."""
    return [one._replace(at_s=one.at_s / (1 + more)) for one in future]


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
