"""SLO-aware routing: one instance or two for each request, by predicted times and limits.

For each request all instances are compared as the one that serves both legs, and all pairs of one
that prefills and one that decodes, each with what it has of the prompt's KV: the next turn of a
chat goes on where the last one lies, one that decodes included, if that is predicted to be faster.
Roles say who mostly does what: an instance serves a leg that is not its own where that is predicted
to be clearly better, since engines know no role.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp
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
_MOST_RATIO = 100.0


@dataclass(frozen=True, slots=True)
class SloAwareOptions:
    """Options of ``slo_aware``.

    Attributes:
        ttft_s, tpot_s: Limits of a request that names none; 0 is none, and with neither latency
            decides alone.
        rate_window_s: Over which the prompts that an instance is sent are smoothed.
        tolerance: Excess by which candidates may differ and latency decides between them.
        late_weight: What a request that misses a limit anyway still counts for each further
            multiple of the limit; at 0 it would be queued where it harms least, for ever.
        off_role_factor: By which a candidate that does not keep to the roles counts as slower; for
            one that decodes by the share of the prompt that it would have to compute.
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
    """Limits of a request; 0 is none."""

    ttft_s: float
    tpot_s: float


class LegCandidate(NamedTuple):
    """A way to serve a request.

    Attributes:
        prefill: None where ``decode`` serves both legs.
        ttft_s, tpot_s: Predicted of the request.
        excess: Requests that miss a limit for it, itself among them, as expected.
        latency_s: Time until its last token, and what others take longer for it, together.
    """

    prefill: InstanceId | None
    decode: InstanceId
    ttft_s: float
    tpot_s: float
    excess: float
    latency_s: float


class Harm(NamedTuple):
    """What a leg costs the others at its instance: limits missed, and seconds, together."""

    excess: float
    delay_s: float


class RouteSituation(NamedTuple):
    """What a choice is made from.

    Attributes:
        views: Of instances that are ready, first the one to be preferred among equals.
        own_lengths: Outputs that the request may have.
        resident: Tokens of the prompt that lie in an instance's own cache, by instance.
        limits: Of the request.
        others_tpot_s: Limit of those that decode; 0 is none.
        others_missed: Chance that one of them misses it as it is, by instance; empty without one.
        whole: Instances whose role it is to serve both legs of this request where it has but one.
        is_whole: It has but one.
        first_token_waits: As in ``RequestView``.
        may_leave_role: Instances may serve legs that are not those of their role.
    """

    views: Sequence[InstanceView]
    times: Mapping[InstanceId, InstanceTimes]
    leg: LegLoad
    resident: Mapping[InstanceId, int]
    lengths: OutputLengths
    own_lengths: Sequence[int]
    limits: Limits
    others_tpot_s: float
    others_missed: Mapping[InstanceId, float]
    whole: Sequence[InstanceView]
    is_whole: bool
    first_token_waits: bool
    may_leave_role: bool

    def leg_at(self, instance: InstanceId) -> LegLoad:
        """The request's leg where some of its prompt's KV may lie already."""
        resident = self.resident.get(instance, 0)
        return self.leg.where(resident) if resident else self.leg


def missed(ratio: float) -> float:
    """Chance that a limit is missed of which ``ratio`` is predicted to be taken, in [0, 1].

    A prediction errs, so one just at the limit counts for a half.
    """
    return 1 - 1 / (1 + min(ratio, _MOST_RATIO) ** _STEEPNESS)


def choose(situation: RouteSituation, options: SloAwareOptions) -> LegCandidate:
    """Returns the candidate of least excess, and among those of about the least, of latency.

    Pure. There is at least one: ``plan_legs`` has found somebody for each leg.
    """
    found = [*_whole(situation, options), *_apart(situation, options)]
    least = min(one.excess for one in found) + options.tolerance
    return min((one for one in found if one.excess <= least), key=lambda one: one.latency_s)


def _whole(s: RouteSituation, options: SloAwareOptions) -> Iterator[LegCandidate]:
    """One instance for both legs; that is the role of those that do both."""
    mean = s.lengths.mean_tokens
    for view in s.views:
        is_own = view.role is Role.COLOCATED or (s.is_whole and view in s.whole)
        if not is_own and not s.may_leave_role:
            continue
        times, leg = s.times[view.id], s.leg_at(view.id)
        tokens = leg.prompt + leg.output / 2
        ttft_s = times.first_token_s(leg) + times.room_s(leg.prompt + leg.output, mean)
        own = _tokens(s, times, times.token_s_with(1, tokens), tokens, 0.0)
        harm = _harm(s, view.id, times.leg_s(leg), times.added_token_s(tokens))
        factor = 1.0 if is_own else _off_role_factor(view, leg, options)
        yield _candidate(s, options, None, view.id, ttft_s, own, harm, factor)


def _off_role_factor(view: InstanceView, leg: LegLoad, options: SloAwareOptions) -> float:
    """By how much serving both legs counts as slower at an instance of one role.

    To one that decodes only what it has to compute of the prompt is work of another role.
    """
    share = leg.to_compute / leg.prompt if view.role is Role.DECODE else 1.0
    return 1 + (options.off_role_factor - 1) * share


def _apart(s: RouteSituation, options: SloAwareOptions) -> Iterator[LegCandidate]:
    """One instance for the prompt and another one to go on from it.

    Two that do both are left out: what one could gain by handing over it loses by computing
    prompts of the other.
    """
    roles = {view.role for view in s.views}
    if s.is_whole or len(roles) < 2:
        return
    mean, leg = s.lengths.mean_tokens, s.leg
    firsts = []
    for view in s.views:
        if view.role is Role.PREFILL or (view.role is Role.COLOCATED and Role.DECODE in roles):
            times, own_leg = s.times[view.id], s.leg_at(view.id)
            ttft_s = times.first_token_s(own_leg) + times.room_s(leg.prompt, mean)
            firsts.append((view, ttft_s, _harm(s, view.id, times.leg_s(own_leg), 0.0)))
    for view in s.views:
        if view.role is Role.PREFILL or (view.role is Role.COLOCATED and Role.PREFILL not in roles):
            continue
        times = s.times[view.id]
        tokens = leg.prompt + leg.output / 2
        fetched = leg.prompt - s.leg_at(view.id).resident
        room_s = times.room_s(leg.prompt + leg.output, mean)
        token_s = times.token_s_behind(1, tokens, leg.output)
        harm = _harm(s, view.id, 0.0, times.added_token_s(tokens))
        by_way: dict[float, tuple[_Tokens, float]] = {}
        for first, ttft_s, first_harm in firsts:
            if first.id == view.id or first.role is view.role:
                continue
            taken_s = way_s(first, view, fetched)
            if (begun := by_way.get(taken_s)) is None:
                begins_s, waits_s = room_s + times.handover_s(fetched, taken_s), 0.0
                if s.first_token_waits:
                    begins_s, waits_s = 0.0, begins_s + token_s
                begun = by_way[taken_s] = _tokens(s, times, token_s, tokens, begins_s), waits_s
            own, waits_s = begun
            both = Harm(first_harm.excess + harm.excess, first_harm.delay_s + harm.delay_s)
            yield _candidate(s, options, first.id, view.id, ttft_s + waits_s, own, both, 1.0)


class _Tokens(NamedTuple):
    """Tokens of the request after the first: their time, and the chance to miss its limit."""

    tpot_s: float
    missed: float


def _tokens(
    s: RouteSituation, times: InstanceTimes, token_s: float, tokens: float, begins_s: float
) -> _Tokens:
    """Returns how the tokens of a request of so many ``tokens`` will come.

    Args:
        token_s: Time of each on average.
        begins_s: Between the first and the second, beside that.
    """
    tpot_s = token_s + begins_s / max(1.0, s.leg.output - 1)
    if not s.limits.tpot_s:
        return _Tokens(tpot_s, 0.0)
    step_s = times.step_s_with(1, tokens)
    return _Tokens(tpot_s, missed_by(times, s.own_lengths, s.limits.tpot_s, step_s, begins_s))


def _candidate(
    s: RouteSituation,
    options: SloAwareOptions,
    prefill: InstanceId | None,
    decode: InstanceId,
    ttft_s: float,
    tokens: _Tokens,
    harm: Harm,
    factor: float,
) -> LegCandidate:
    ttft_ratio = ttft_s / s.limits.ttft_s if s.limits.ttft_s else 0.0
    has_tokens = s.leg.output > 1 and s.limits.tpot_s
    ratio = max(ttft_ratio, tokens.tpot_s / s.limits.tpot_s if has_tokens else 0.0)
    own = 1 - (1 - missed(ttft_ratio)) * (1 - tokens.missed)
    excess = own + options.late_weight * max(0.0, ratio - 1) + harm.excess
    latency_s = ttft_s + tokens.tpot_s * max(0.0, s.leg.output - 1) + harm.delay_s
    return LegCandidate(prefill, decode, ttft_s, tokens.tpot_s, excess, factor * latency_s)


def _harm(s: RouteSituation, instance: InstanceId, once_s: float, token_s: float) -> Harm:
    """What a leg costs those who decode at its instance, or will before it does.

    Args:
        once_s: That each of them waits once, for a prompt.
        token_s: That each of their steps takes longer.
    """
    times = s.times[instance]
    count = times.all_requests
    if not count:
        return Harm(0.0, 0.0)
    # They have half of their tokens to come, on average.
    delay_s = count * (once_s + token_s * s.lengths.mean_tokens / 2)
    if not s.others_tpot_s:
        return Harm(0.0, delay_s)
    lengths, step_s = s.lengths.present_tokens, times.step_s_with() + token_s
    after = missed_by(times, lengths, s.others_tpot_s, step_s, once_s)
    return Harm(count * (after - s.others_missed[instance]), delay_s)


def missed_by(
    times: InstanceTimes,
    lengths: Sequence[int],
    limit_s: float,
    step_s: float,
    once_s: float = 0.0,
) -> float:
    """Chance that a request of one of ``lengths`` misses its limit of time per token.

    Few tokens are done before the next prompt comes, or are stopped by it for long: their mean,
    which a long output comes near, says nothing of either. So both are looked at, each with its
    chance. Called for every request and instance a few times, so it calls little itself.

    Args:
        step_s: Of the steps that decode it.
        once_s: That it waits once.
    """
    mean_s, token_s = times.interrupted(step_s)
    rate, chance = -times.prompts_per_s, 0.0
    for length in lengths:
        if length > 1:
            own_s = step_s + once_s / (length - 1)
            quiet = exp(rate * length * token_s)
            ratio = own_s / limit_s
            within = 1 / (1 + (ratio if ratio < _MOST_RATIO else _MOST_RATIO) ** _STEEPNESS)
            chance += quiet * (1 - within)
            if quiet < 1:
                ratio = (own_s + mean_s / (1 - quiet)) / limit_s
                within = 1 / (1 + (ratio if ratio < _MOST_RATIO else _MOST_RATIO) ** _STEEPNESS)
                chance += (1 - quiet) * (1 - within)
    return chance / len(lengths)


class _Promise(NamedTuple):
    """A request that will decode at an instance and is computed at another one as yet."""

    until_s: float
    instance: InstanceId
    tokens: int


@register("slo_aware")
class SloAware:
    """Serves each request where the fewest limits are missed for it, its own and others'.

    It remembers what it has sent: prompts for a while, since those to come will be like them, and
    decode legs until they begin. Among equals the instance chosen longest ago is taken.
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
        assumed, limit_s = assumed_coefficients(ready), options.tpot_s
        times = {
            view.id: self._times(view, lengths.mean_tokens, assumed, cluster.now_s)
            for view in ready
        }
        others_missed = {
            name: missed_by(one, lengths.present_tokens, limit_s, one.step_s_with())
            for name, one in times.items()
            if limit_s
        }
        return RouteSituation(
            self._turns.order(ready),
            times,
            LegLoad(max(1, request.uncached_tokens), request.cached_tokens, output),
            request.resident_tokens,
            lengths,
            own_lengths,
            limits,
            limit_s,
            others_missed,
            legs.decode,
            not legs.prefill,
            request.first_token_waits,
            self._legs.fallback,
        )

    def _times(
        self, view: InstanceView, output_tokens: float, assumed: tuple[float, ...], now_s: float
    ) -> InstanceTimes:
        coming = [one.tokens for one in self._promises if one.instance == view.id]
        recent = self._prompts_at(view.id, now_s)
        return times_of(view, output_tokens, assumed, recent, len(coming), sum(coming))

    def _prompts_at(self, instance: InstanceId, now_s: float) -> RecentPrompts:
        at_s, recent = self._prompts.get(instance, (now_s, NO_PROMPTS))
        return recent.after(now_s - at_s, self._options.rate_window_s)

    def _remember(self, chosen: LegCandidate, situation: RouteSituation, now_s: float) -> None:
        first = chosen.decode if chosen.prefill is None else chosen.prefill
        recent = self._prompts_at(first, now_s)
        leg = situation.leg_at(first)
        self._prompts[first] = (now_s, recent.and_one(leg, self._options.rate_window_s))
        by_id = {view.id: view for view in situation.views}
        self._turns.take(by_id[first])
        if chosen.prefill is not None:
            self._turns.take(by_id[chosen.decode])
            until_s = now_s + chosen.ttft_s
            self._promises.append(_Promise(until_s, chosen.decode, situation.leg.prompt))
