"""SLO-aware routing: one instance or two for each request, by predicted times and limits.

Each request compares all single instances for both legs, and all pairs of a prefill and a decode
instance, each with the prompt's KV in its own cache: the next turn of a chat goes to the instance
that has the KV of the last one, also to a decode instance, if that is predicted to be faster. Roles
are defaults: an instance serves a leg of another role if that is predicted to be clearly better,
since engines know no role.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter, itemgetter
from typing import ClassVar, NamedTuple

from banaserve.base.errors import UserError
from banaserve.base.types import (
    ClusterView,
    InstanceId,
    InstanceView,
    OutputLengths,
    RequestLimits,
    RequestView,
    Role,
    Route,
)
from banaserve.orchestrator.control.model.excess import (
    Excesses,
    LegCandidate,
    LegPlace,
    RouteSituation,
)
from banaserve.orchestrator.control.model.moving import way_s
from banaserve.orchestrator.control.model.serving_times import (
    NO_PROMPTS,
    InstanceTimes,
    LegLoad,
    RecentPrompts,
    assumed_coefficients,
    times_of,
)
from banaserve.orchestrator.control.routing.legs import LegOptions, LegReason, Legs, plan_legs
from banaserve.orchestrator.control.routing.option_checks import check_number
from banaserve.orchestrator.control.routing.registry import register
from banaserve.orchestrator.control.routing.rotation import Rotation

_UNKNOWN_LENGTHS = OutputLengths(128.0, (128,), (128,))
_LATENCY = attrgetter("latency_s")


@dataclass(frozen=True, slots=True)
class SloAwareOptions:
    """Options of ``slo_aware``.

    Attributes:
        ttft_s, tpot_s: Limits of a request without limits of its own, in seconds; 0 is no limit.
            With neither limit, only latency decides.
        rate_window_s: Smoothing time of the rate of prompts sent to an instance, in seconds.
        tolerance: Maximum difference in excess of candidates between which latency decides.
        late_weight: Excess that a request which misses a limit adds for each further multiple of
            the limit; at 0, it would be queued where it harms others least, forever.
        off_role_factor: Factor by which a candidate with a leg of another role counts as slower; on
            a decode instance, only for the share of the prompt that it would have to compute.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    rate_window_s: float = 10.0
    tolerance: float = 0.3
    late_weight: float = 0.1
    off_role_factor: float = 1.5

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "tolerance", "late_weight"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} is {getattr(self, name)}: give 0 or more")
        check_number("rate_window_s", self.rate_window_s)
        if not self.off_role_factor >= 1:
            raise UserError(f"off_role_factor is {self.off_role_factor}: give 1 or more")


def choose(situation: RouteSituation, options: SloAwareOptions) -> LegCandidate:
    """Return the candidate of least latency among those of about the least excess.

    Pure. There is at least one candidate: ``plan_legs`` has found an instance for each leg.
    Candidates are examined by their latency, and an excess, which takes most of the time, is only
    computed if it can decide.
    """
    excesses, firsts = Excesses(situation, options.late_weight), _firsts(situation)
    whole = [*_whole(situation, options)]
    first = min((*whole, *_apart(situation, _fastest(firsts))), key=_LATENCY)
    if excesses.of(first) <= excesses.LEAST + options.tolerance:
        return first
    found = [*whole, *_apart(situation, firsts)]
    bounded = [(excesses.least_of(one), one) for one in sorted(found, key=_LATENCY)]
    most, rivals = inf, sorted(bounded, key=itemgetter(0), reverse=True)
    for bound, one in bounded:
        if bound > most:
            continue
        excess = excesses.of(one)
        # It is chosen once no rival left can have an excess that excludes it.
        while excess <= most and rivals:
            bound, rival = rivals[-1]
            if excess <= bound + options.tolerance:
                return one
            rivals.pop()
            most = min(most, excesses.of(rival) + options.tolerance)
        if excess <= most:
            return one
    raise AssertionError("the candidate of the least excess is within the tolerance")


def _whole(s: RouteSituation, options: SloAwareOptions) -> Iterator[LegCandidate]:
    """Yield the candidates with one instance for both legs, the role of colocated instances."""
    mean, tokens, leg = s.lengths.mean_tokens, s.tokens, s.leg
    all_tokens, further = leg.prompt + leg.output, max(0.0, leg.output - 1)
    for place in s.places.values():
        view, times = place.view, place.times
        is_own = view.role is Role.COLOCATED or (s.is_whole and view.id in s.whole)
        if not is_own and not s.may_leave_role:
            continue
        ttft_s = place.first_s + times.room_s(all_tokens, mean)
        tpot_s = times.token_s_with(1, tokens)
        delay_s = place.delay_s(place.prompt_s, place.added_s, mean)
        latency_s = ttft_s + tpot_s * further + delay_s
        factor = 1.0 if is_own else _off_role_factor(view, place.leg, options)
        yield LegCandidate(None, view.id, ttft_s, tpot_s, factor * latency_s, 0.0)


def _off_role_factor(view: InstanceView, leg: LegLoad, options: SloAwareOptions) -> float:
    """Return the factor by which both legs at an instance of one role count as slower.

    For a decode instance, only the computed part of the prompt is work of another role.
    """
    share = leg.to_compute / leg.prompt if view.role is Role.DECODE else 1.0
    return 1 + (options.off_role_factor - 1) * share


class _First(NamedTuple):
    """A prefill leg of two legs: its time to the first token, and the delay of others by it."""

    view: InstanceView
    ttft_s: float
    delay_s: float

    def is_as_fast_as(self, other: _First) -> bool:
        """Return whether no candidate with ``other`` is faster than the same one with this leg."""
        is_faster = self.ttft_s <= other.ttft_s and self.delay_s <= other.delay_s
        return is_faster and self.view.role is other.view.role and not self.view.far


def _firsts(s: RouteSituation) -> list[_First]:
    """Return the prefill legs of candidates with two instances.

    Pairs of colocated instances are left out: the gain of one from handing over is lost by
    computing prompts of the other.
    """
    if s.is_whole:
        return []
    places, mean = s.places.values(), s.lengths.mean_tokens
    has_decode = any(place.view.role is Role.DECODE for place in places)
    return [
        _First(
            place.view,
            place.first_s + place.times.room_s(s.leg.prompt, mean),
            place.delay_s(place.prompt_s, 0.0, mean),
        )
        for place in places
        if place.view.role is Role.PREFILL or (place.view.role is Role.COLOCATED and has_decode)
    ]


def _fastest(firsts: Sequence[_First]) -> list[_First]:
    """Return the legs without those that the leg of an earlier instance makes unnecessary."""
    kept: list[_First] = []
    for one in firsts:
        if not any(other.is_as_fast_as(one) for other in kept):
            kept.append(one)
    return kept


def _apart(s: RouteSituation, firsts: Sequence[_First]) -> Iterator[LegCandidate]:
    """Yield the candidates with one of ``firsts`` and another instance for decode."""
    if not firsts:
        return
    places, mean, leg, tokens = s.places.values(), s.lengths.mean_tokens, s.leg, s.tokens
    has_prefill = any(place.view.role is Role.PREFILL for place in places)
    further = max(0.0, leg.output - 1)
    for place in places:
        view, times = place.view, place.times
        if view.role is Role.PREFILL or (view.role is Role.COLOCATED and not has_prefill):
            continue
        fetched = leg.prompt - place.leg.resident
        room_s = times.room_s(leg.prompt + leg.output, mean)
        token_s = times.token_s_behind(1, tokens, leg.output)
        delay_s = place.delay_s(0.0, place.added_s, mean)
        by_way: dict[float, tuple[float, float, float]] = {}
        for first, ttft_s, first_delay_s in firsts:
            if first.role is view.role:
                continue
            taken_s = way_s(first, view, fetched)
            if (begun := by_way.get(taken_s)) is None:
                begins_s, waits_s = room_s + times.handover_s(fetched, taken_s), 0.0
                if s.first_token_waits:
                    begins_s, waits_s = 0.0, begins_s + token_s
                tpot_s = token_s + begins_s / max(1.0, leg.output - 1)
                begun = by_way[taken_s] = begins_s, waits_s, tpot_s
            begins_s, waits_s, tpot_s = begun
            first_s = ttft_s + waits_s
            latency_s = first_s + tpot_s * further + (first_delay_s + delay_s)
            yield LegCandidate(first.id, view.id, first_s, tpot_s, latency_s, begins_s)


class _Promise(NamedTuple):
    """A request that will decode at an instance and is still computed at another one."""

    until_s: float
    instance: InstanceId
    tokens: int


@register("slo_aware")
class SloAware:
    """Policy that minimises the missed limits of each request and of those that it delays.

    It remembers sent prompts for a while, since coming prompts will resemble them, and decode legs
    until they begin. Among equals, the instance chosen longest ago is taken.
    """

    Options: ClassVar = SloAwareOptions
    reads_resident_tokens: ClassVar = True

    def __init__(self, options: SloAwareOptions, legs: LegOptions, start: int = 0) -> None:
        self._options = options
        self._legs = legs
        self._turns = Rotation(start)
        self._promises: list[_Promise] = []
        self._prompts: dict[InstanceId, tuple[float, RecentPrompts]] = {}

    def route(self, request: RequestView, cluster: ClusterView) -> Route:
        now_s = cluster.now_s
        self._promises = [one for one in self._promises if one.until_s > now_s]
        legs = plan_legs(request, cluster, self._legs)
        situation = self._situation(request, cluster, legs)
        best = choose(situation, self._options)
        self._remember(best, situation, now_s)
        reason = legs.reason
        if legs.prefill and best.prefill is None:
            is_both = cluster.instances[best.decode].role is Role.COLOCATED
            reason = LegReason.COLOCATED if is_both else LegReason.OTHER_ROLE
        return Route(best.prefill, best.decode, reason, best.ttft_s, best.tpot_s)

    def _situation(self, request: RequestView, cluster: ClusterView, legs: Legs) -> RouteSituation:
        options = self._options
        ready = [view for view in cluster.instances.values() if view.ready]
        lengths = cluster.output_lengths or _UNKNOWN_LENGTHS
        output, own_lengths = lengths.mean_tokens, lengths.arriving_tokens
        if (most := request.max_output_tokens) and most < own_lengths[-1]:
            own_lengths = tuple(min(most, length) for length in own_lengths)
            output = min(output, most)
        own = request.limits
        limits = RequestLimits(
            options.ttft_s if own.ttft_s is None else own.ttft_s,
            options.tpot_s if own.tpot_s is None else own.tpot_s,
        )
        leg = LegLoad(max(1, request.uncached_tokens), request.cached_tokens, output)
        tokens = leg.prompt + output / 2
        times = self._times(ready, lengths.mean_tokens, cluster.now_s)
        places = {}
        for view in self._turns.order(ready):
            resident, one = request.resident_tokens.get(view.id, 0), times[view.id]
            own_leg = leg.where(resident) if resident else leg
            places[view.id] = LegPlace(
                view,
                one,
                own_leg,
                one.first_token_s(own_leg),
                one.leg_s(own_leg),
                one.added_token_s(tokens),
            )
        return RouteSituation(
            places,
            leg,
            tokens,
            lengths,
            own_lengths,
            limits,
            options.tpot_s,
            {view.id for view in legs.decode},
            not legs.prefill,
            request.first_token_waits,
            self._legs.fallback,
        )

    def _times(
        self, ready: Sequence[InstanceView], output_tokens: float, now_s: float
    ) -> dict[InstanceId, InstanceTimes]:
        assumed = assumed_coefficients(ready)
        coming: dict[InstanceId, list[int]] = {}
        for one in self._promises:
            coming.setdefault(one.instance, []).append(one.tokens)
        return {
            view.id: times_of(
                view,
                output_tokens,
                assumed,
                self._prompts_at(view.id, now_s),
                len(tokens := coming.get(view.id, ())),
                sum(tokens),
            )
            for view in ready
        }

    def _prompts_at(self, instance: InstanceId, now_s: float) -> RecentPrompts:
        if instance not in self._prompts:
            return NO_PROMPTS
        at_s, recent = self._prompts[instance]
        return recent.after(now_s - at_s, self._options.rate_window_s)

    def _remember(self, chosen: LegCandidate, situation: RouteSituation, now_s: float) -> None:
        first = chosen.decode if chosen.prefill is None else chosen.prefill
        recent = self._prompts_at(first, now_s)
        place = situation.places[first]
        self._prompts[first] = (now_s, recent.and_one(place.leg, self._options.rate_window_s))
        self._turns.take(place.view)
        if chosen.prefill is not None:
            self._turns.take(situation.places[chosen.decode].view)
            until_s = now_s + chosen.ttft_s
            self._promises.append(_Promise(until_s, chosen.decode, situation.leg.prompt))
