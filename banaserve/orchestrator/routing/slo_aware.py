"""SLO-aware routing: one instance or two for each request, by predicted times and limits.

Each request compares all single instances for both legs, and all pairs of a prefill and a decode
instance, each with the prompt's KV in its own cache: the next turn of a chat goes to the instance
that has the KV of the last one, also to a decode instance, if that is predicted to be faster. Roles
are defaults: an instance serves a leg of another role if that is predicted to be clearly better,
since engines know no role.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import exp, inf
from operator import attrgetter, itemgetter
from typing import ClassVar, NamedTuple

from banaserve.errors import UserError
from banaserve.orchestrator.model.handing_over import way_s
from banaserve.orchestrator.model.serving_times import (
    NO_PROMPTS,
    InstanceTimes,
    LegLoad,
    RecentPrompts,
    assumed_coefficients,
    times_of,
)
from banaserve.orchestrator.routing.checks import check_number
from banaserve.orchestrator.routing.legs import LegOptions, LegReason, Legs, plan_legs
from banaserve.orchestrator.routing.registry import register
from banaserve.orchestrator.routing.rotation import Rotation
from banaserve.types import (
    ClusterView,
    InstanceId,
    InstanceView,
    OutputLengths,
    RequestView,
    Role,
    Route,
)

_UNKNOWN_LENGTHS = OutputLengths(128.0, (128,), (128,))
_STEEPNESS = 10
_LATENCY = attrgetter("latency_s")
_MOST_RATIO = 100.0


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


class Limits(NamedTuple):
    """Limits of a request, in seconds; 0 is no limit."""

    ttft_s: float
    tpot_s: float


class LegCandidate(NamedTuple):
    """A way to serve a request.

    Attributes:
        prefill: Instance of the prefill leg; None if ``decode`` serves both legs.
        ttft_s, tpot_s: Predicted latencies of the request.
        latency_s: Time until its last token, plus the delay of other requests because of it.
        begins_s: Additional time between the first and the second output token.
    """

    prefill: InstanceId | None
    decode: InstanceId
    ttft_s: float
    tpot_s: float
    latency_s: float
    begins_s: float


class LegPlace(NamedTuple):
    """The request at one instance.

    Attributes:
        leg: Tokens of the request, with those of its prompt in the instance's own cache.
        first_s: Time until its prompt is computed, once there is room for its KV.
        prompt_s: Time that its prompt adds to the steps that compute it.
        added_s: Time that it adds to each step while it decodes.
    """

    view: InstanceView
    times: InstanceTimes
    leg: LegLoad
    first_s: float
    prompt_s: float
    added_s: float

    def delay_s(self, once_s: float, token_s: float, output_tokens: float) -> float:
        """Return the sum of the delays of the other requests there because of a leg.

        Args:
            once_s: Time that each of these requests waits once, for a prompt.
            token_s: Time by which each of their steps becomes longer.
            output_tokens: Their mean output length; on average, half of it is still to come.
        """
        return self.times.all_requests * (once_s + token_s * output_tokens / 2)


class RouteSituation(NamedTuple):
    """Input of a choice.

    Attributes:
        places: The request at each ready instance; among equals, the first is preferred.
        leg: Tokens of the request, without tokens in instances' own caches.
        tokens: Mean number of tokens of the request while it decodes.
        lengths: Output lengths of recent requests.
        own_lengths: Output lengths that the request may have.
        limits: Limits of the request.
        others_tpot_s: TPOT limit of the requests that decode; 0 is no limit.
        whole: Instances whose role is to serve the whole request, if it has one leg only.
        is_whole: True if the request has one leg only.
        first_token_waits: Flag ``first_token_waits`` of the ``RequestView``.
        may_leave_role: True if instances may serve legs of another role.
    """

    places: Mapping[InstanceId, LegPlace]
    leg: LegLoad
    tokens: float
    lengths: OutputLengths
    own_lengths: Sequence[int]
    limits: Limits
    others_tpot_s: float
    whole: Set[InstanceId]
    is_whole: bool
    first_token_waits: bool
    may_leave_role: bool


def missed(ratio: float) -> float:
    """Return the probability that a request misses a limit, in [0, 1].

    A prediction errs, so that a predicted time equal to the limit gives one half.

    Args:
        ratio: Predicted time as a multiple of the limit.
    """
    return 1 - 1 / (1 + min(ratio, _MOST_RATIO) ** _STEEPNESS)


def choose(situation: RouteSituation, options: SloAwareOptions) -> LegCandidate:
    """Return the candidate of least latency among those of about the least excess.

    Pure. There is at least one candidate: ``plan_legs`` has found an instance for each leg.
    Candidates are examined by their latency, and an excess, which takes most of the time, is only
    computed if it can decide.
    """
    excesses, firsts = _Excesses(situation, options), _firsts(situation)
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


class _Excesses:
    """Excess of candidates: the expected number of requests that miss a limit because of one.

    The request itself is among them. Parts that candidates share are computed once.
    """

    LEAST: ClassVar = -1e-6
    """Bound of every excess from below: a leg makes no request faster, but for rounding."""

    def __init__(self, situation: RouteSituation, options: SloAwareOptions) -> None:
        self._situation = situation
        self._late_weight = options.late_weight
        self._known: dict[tuple[InstanceId | None, InstanceId], float] = {}
        self._own: dict[tuple[InstanceId, float], float] = {}
        self._harms: dict[tuple[InstanceId, bool, bool], float] = {}
        self._anyway: dict[InstanceId, float] = {}

    def of(self, one: LegCandidate) -> float:
        """Return the excess of ``one``."""
        prefill, decode = key = one.prefill, one.decode
        if key not in self._known:
            own, late = self._of_first_token(one)
            own = 1 - (1 - own) * (1 - self._own_missed(decode, one.begins_s))
            if prefill is None:
                harm = self._harm(decode, True, True)
            else:
                harm = self._harm(prefill, True, False) + self._harm(decode, False, True)
            self._known[key] = own + late + harm
        return self._known[key]

    def least_of(self, one: LegCandidate) -> float:
        """Return a bound of the excess of ``one`` from below, which takes little time."""
        own, late = self._of_first_token(one)
        return own + late + self.LEAST

    def _of_first_token(self, one: LegCandidate) -> tuple[float, float]:
        """Return the probability that the first token is late, and the weighted lateness."""
        limits, ttft_ratio, ratio = self._situation.limits, 0.0, 0.0
        if limits.ttft_s:
            ttft_ratio = ratio = one.ttft_s / limits.ttft_s
        if limits.tpot_s and self._situation.leg.output > 1:
            ratio = max(ratio, one.tpot_s / limits.tpot_s)
        return missed(ttft_ratio), self._late_weight * max(0.0, ratio - 1)

    def _own_missed(self, decode: InstanceId, begins_s: float) -> float:
        """Return the probability that the request misses its limit per token."""
        s, key = self._situation, (decode, begins_s)
        if not s.limits.tpot_s:
            return 0.0
        if key not in self._own:
            times = s.places[decode].times
            step_s = times.step_s_with(1, s.tokens)
            self._own[key] = missed_by(times, s.own_lengths, s.limits.tpot_s, step_s, begins_s)
        return self._own[key]

    def _harm(self, instance: InstanceId, prefills: bool, decodes: bool) -> float:
        """Return the expected number of other requests that miss their limit because of a leg.

        They are those that decode at its instance, or will before it.

        Args:
            prefills, decodes: True if the prompt is computed there, and if the request decodes
                there.
        """
        s, key = self._situation, (instance, prefills, decodes)
        place, limit_s = s.places[instance], s.others_tpot_s
        times = place.times
        if not times.all_requests or not limit_s:
            return 0.0
        if key not in self._harms:
            lengths, step_s = s.lengths.present_tokens, times.step_s_with()
            if instance not in self._anyway:
                self._anyway[instance] = missed_by(times, lengths, limit_s, step_s)
            once_s = place.prompt_s if prefills else 0.0
            step_s += place.added_s if decodes else 0.0
            after = missed_by(times, lengths, limit_s, step_s, once_s)
            self._harms[key] = times.all_requests * (after - self._anyway[instance])
        return self._harms[key]


def missed_by(
    times: InstanceTimes,
    lengths: Sequence[int],
    limit_s: float,
    step_s: float,
    once_s: float = 0.0,
) -> float:
    """Return the probability that a request of one of ``lengths`` misses its limit per token.

    A short output either ends before the next prompt arrives or is delayed by it for long; the mean
    delay, which a long output has, describes neither case. So both cases are computed, each with
    its probability. Called several times for every request and instance, hence few calls inside.

    Args:
        lengths: Possible output lengths, with equal probability.
        limit_s: Limit of the time per token, in seconds.
        step_s: Time of a step that decodes the request.
        once_s: Time that the request waits once.
    """
    mean_s, token_s = times.interrupted(step_s)
    rate, chance, before = -times.prompts_per_s, 0.0, 0
    for length in lengths:
        if length > 1:
            if length != before:
                before = length
                own_s = step_s + once_s / (length - 1)
                quiet = exp(rate * length * token_s)
                ratio = own_s / limit_s
                within = 1 / (1 + (ratio if ratio < _MOST_RATIO else _MOST_RATIO) ** _STEEPNESS)
                missed_quiet = quiet * (1 - within)
                missed_else = 0.0
                if quiet < 1:
                    ratio = (own_s + mean_s / (1 - quiet)) / limit_s
                    within = 1 / (1 + (ratio if ratio < _MOST_RATIO else _MOST_RATIO) ** _STEEPNESS)
                    missed_else = (1 - quiet) * (1 - within)
            chance += missed_quiet
            chance += missed_else
    return chance / len(lengths)


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
        limits = Limits(
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
