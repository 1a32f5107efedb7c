"""Expected number of requests that miss a limit because of a way to serve a request. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import exp
from typing import ClassVar, NamedTuple

from banaserve.base.types import InstanceId, InstanceView, OutputLengths, RequestLimits
from banaserve.orchestrator.control.model.serving_times import InstanceTimes, LegLoad

_STEEPNESS = 10
_MOST_RATIO = 100.0


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
            output_tokens: Mean output length of these requests; half of it is still to come.
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
        limits: Limits of the request, in seconds; 0 is no limit.
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
    limits: RequestLimits
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


class Excesses:
    """Excess of candidates: the expected number of requests that miss a limit because of one.

    The request itself is among them. Parts that candidates share are computed once.

    Args:
        late_weight: Option of ``slo_aware``.
    """

    LEAST: ClassVar = -1e-6
    """Bound of every excess from below: a leg makes no request faster, but for rounding."""

    def __init__(self, situation: RouteSituation, late_weight: float) -> None:
        self._situation = situation
        self._late_weight = late_weight
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
