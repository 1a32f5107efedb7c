"""Search for the arrangement of a load: candidates are chosen on one load, judged on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from banaserve.base.errors import UserError
from banaserve.sim.result import LatencyLimits
from banaserve_bench.plan.search.candidates import (
    USUAL_STEP_TOKENS,
    Candidate,
    colocated,
    elastic,
)
from banaserve_bench.plan.search.flips import Flip, find_flips
from banaserve_bench.plan.search.gain import WORTH, Answer, Gain, GoodputRuns, answer, gain
from banaserve_bench.plan.search.loads import (
    Rows,
    cut_share,
    faster,
    feasible_share,
    longer,
    mean_prompt,
    rate_per_s,
)
from banaserve_bench.plan.search.question import PlanQuestion
from banaserve_bench.plan.search.sensitivities import Sensitivity, find_sensitivities
from banaserve_bench.plan.search.trial import Device, Scenario

Tell = Callable[[str], None]
Result = Mapping[str, Any]
_GLANCED = 500
"""Most requests of the first load for the first estimate, which keeps the best arrangements."""
_KEPT = 3
"""Number of colocated arrangements, and of others, that are tried with all sizes."""
_SCREENED = 2000
"""Most requests of the first load on which candidates are compared."""
_FLIP_REQUESTS = 1000
_RIVALS = 2
"""Number of colocated candidates that are judged: the best of them counts."""
_DIFFERENCE = 0.01
"""Least difference of goodput that makes a counter-offer."""
_ENOUGH = 0.99


class Tried(NamedTuple):
    """Candidate and its result on the first load, at predicted step times."""

    candidate: Candidate
    result: Result

    @property
    def goodput(self) -> float:
        """Share of requests within the limits."""
        return float(self.result["goodput_fraction"])


class CounterOffer(NamedTuple):
    """Another way to a better goodput than that of ``instead_of``, without a split.

    Attributes:
        kind: Subject that differs: ``steps``, ``store`` or ``instances``.
    """

    kind: str
    offered: Tried
    instead_of: Tried


@dataclass(frozen=True, slots=True)
class Screening:
    """Candidates by their results on the first load, the best first.

    Attributes:
        feasible_fraction: Share of requests that an idle engine serves within the limits.
    """

    feasible_fraction: float
    colocated: Sequence[Tried]
    others: Sequence[Tried]


@dataclass(frozen=True, slots=True)
class Advice:
    """Answer, and what it rests on.

    Attributes:
        rival: Best colocated candidate.
        challenger: Best other candidate; None for one instance, which cannot be split.
        found: Gain of the challenger over the rival.
        results: Results on the loads that judge, at predicted step times, by candidate.
        flips: Changes of the estimate with the length of prompts and the rate.
        sensitivities: Answers to questions that differ a little.
    """

    answer: Answer
    rival: Candidate
    challenger: Candidate | None
    found: Gain | None
    results: Mapping[str, Sequence[Result]]
    offers: Sequence[CounterOffer]
    flips: Sequence[Flip]
    sensitivities: Sequence[Sensitivity] = ()

    @property
    def chosen(self) -> Candidate:
        """Candidate to start: the challenger only where the answer is yes."""
        is_yes = self.answer is Answer.YES
        return self.challenger if is_yes and self.challenger is not None else self.rival


def screen(
    asked: PlanQuestion, tell: Tell, show: Callable[[Screening], None] | None = None
) -> Screening:
    """Return the best candidates with their results on the first load.

    Args:
        show: Called with a first estimate, which has all arrangements, of a part of that load.

    Raises:
        UserError: No request can be within the limits, even on an idle engine.
    """
    feasible = _feasible_share(asked)
    candidates = asked.fixed_candidates()
    usual = [one for one in candidates if one.is_usual]
    glance = _screened(asked, feasible, usual, asked.loads.first[:_GLANCED], tell)
    if show is not None:
        show(glance)
    best = [*_arrangements(glance.colocated), *_arrangements(glance.others)]
    kept = [one for one in candidates if one.arrangement in best]
    kept += _elastic(asked, glance)
    return _screened(asked, feasible, kept, asked.loads.first[:_SCREENED], tell)


def _elastic(asked: PlanQuestion, glance: Screening) -> Iterator[Candidate]:
    """Yield roles that follow the load, if asked for, on instances like those of the best system.

    A single instance has no roles to change, so that systems of one do not count.
    """
    tried = [*glance.colocated, *glance.others]
    several = [one for one in tried if one.candidate.num_instances > 1]
    if asked.has_elastic and several:
        best = max(several, key=lambda one: _rank(one.result, asked.limits)).candidate
        shape = asked.shape(asked.device_of(best))
        yield elastic(best.num_instances, asked.profile_name, asked.limits, shape)


def _feasible_share(asked: PlanQuestion) -> float:
    """Return the share of requests that an idle engine of the best kind serves in time."""
    shares, problem = [], None
    for device in asked.devices:
        costs = device.costs
        costs.slowdown = asked.scenarios[2].factor
        try:
            shares.append(feasible_share(asked.loads.first, costs, asked.limits))
        except UserError as error:
            problem = error
    if not shares and problem is not None:
        raise problem
    return max(shares)


def _arrangements(tried: Sequence[Tried]) -> list[str]:
    return list(dict.fromkeys(one.candidate.arrangement for one in tried))[:_KEPT]


def _screened(
    asked: PlanQuestion,
    feasible: float,
    candidates: Sequence[Candidate],
    rows: Rows,
    tell: Tell,
) -> Screening:
    tried = [_tried(asked, one, rows, tell) for one in candidates]
    tried.sort(key=lambda one: _rank(one.result, asked.limits), reverse=True)
    return Screening(
        feasible,
        [one for one in tried if one.candidate.is_colocated],
        [one for one in tried if not one.candidate.is_colocated],
    )


def _tried(asked: PlanQuestion, one: Candidate, rows: Rows, tell: Tell) -> Tried:
    tell(f"{len(rows)} requests: {one.name}")
    return Tried(one, asked.run(one, rows, asked.scenarios[1]))


def advise(asked: PlanQuestion, found: Screening, tell: Tell) -> Advice:
    """Judge the best candidates of a screening on the other loads."""
    rivals = [one.candidate for one in found.colocated[:_RIVALS]]
    challenger = found.others[0].candidate if found.others else None
    runs, results = {}, {}
    for one in [*rivals, *([challenger] if challenger else [])]:
        runs[one.name], results[one.name] = _judged(asked, one, tell)
    rival = max(rivals, key=lambda one: sum(runs[one.name].predicted))
    offers = list(_offers(asked, found, tell))
    if challenger is None:
        return Advice(Answer.NO, rival, None, None, results, offers, ())
    numbers = [len(rows) for rows in asked.loads.others]
    of = gain(runs[challenger.name], runs[rival.name], numbers)
    told = answer(of, asked.error is not None)
    flips = _flips(asked, found, tell)
    nearby = find_sensitivities(asked, challenger, rival, tell)
    return Advice(told, rival, challenger, of, results, offers, flips, nearby)


def _judged(asked: PlanQuestion, one: Candidate, tell: Tell) -> tuple[GoodputRuns, list[Result]]:
    """Return goodputs on the loads that judge, and results at predicted step times."""
    slow, predicted, fast = asked.scenarios

    def results(scenario: Scenario) -> list[Result]:
        found: list[Result] = []
        for number, rows in enumerate(asked.loads.others, start=1):
            tell(f"load {number} of {len(asked.loads.others)}: {one.name}")
            found.append(asked.run(one, rows, scenario))
        return found

    told = results(predicted)
    if asked.error is None:
        return GoodputRuns(_goodputs(told), _goodputs(told), _goodputs(told)), told
    at_slow, at_fast = _goodputs(results(slow)), _goodputs(results(fast))
    return GoodputRuns(at_slow, _goodputs(told), at_fast), told


def _goodputs(results: Sequence[Result]) -> list[float]:
    return [float(one["goodput_fraction"]) for one in results]


def _rank(result: Result, limits: LatencyLimits) -> tuple[float, float]:
    """Return goodput and, where that is equal, the room of the slowest requests."""
    late = max(result["ttft_p99_s"] / limits.ttft_s, result["tpot_p99_s"] / limits.tpot_s)
    return float(result["goodput_fraction"]), -late


def _offers(asked: PlanQuestion, found: Screening, tell: Tell) -> Iterator[CounterOffer]:
    """Yield better colocated systems: other steps, a store or its size, other numbers."""
    best = found.colocated[0]
    usual = [one for one in found.colocated if one.candidate.step_tokens == USUAL_STEP_TOKENS]
    alike = [one for one in usual if one.candidate.has_store == best.candidate.has_store]
    if alike and best.goodput > alike[0].goodput + _DIFFERENCE:
        yield CounterOffer("steps", best, alike[0])
    without = [one for one in found.colocated if not one.candidate.has_store]
    if best.goodput > without[0].goodput + _DIFFERENCE:
        yield CounterOffer("store", best, without[0])
    small = [
        one for one in found.colocated if 0 < one.candidate.store_gib < best.candidate.store_gib
    ]
    if small and best.goodput > small[0].goodput + _DIFFERENCE:
        yield CounterOffer("store size", best, small[0])
    goal = _ENOUGH * found.feasible_fraction
    if found.others and found.others[0].goodput > best.goodput + _DIFFERENCE:
        goal = min(goal, found.others[0].goodput)
    enough = best.goodput >= goal
    other = _fewer_gpus(asked, best, goal, tell) if enough else _more(asked, best, goal, tell)
    if other is not None:
        yield CounterOffer("instances", other, best)


def _more(asked: PlanQuestion, best: Tried, goal: float, tell: Tell) -> Tried | None:
    """Return the fewest instances of the same kind, up to twice as many, that reach ``goal``."""
    present = best.candidate.num_instances
    for number in range(present + 1, 2 * present + 1):
        tried = _like(asked, best, asked.device_of(best.candidate), number, tell)
        if tried.goodput >= goal:
            return tried
    return None


def _fewer_gpus(asked: PlanQuestion, best: Tried, goal: float, tell: Tell) -> Tried | None:
    """Return the colocated instances of the fewest GPUs that reach ``goal``; None for all GPUs."""
    found, fewest = None, asked.num_gpus
    for device in asked.devices:
        for number in range((fewest - 1) // device.gpus, 0, -1):
            tried = _like(asked, best, device, number, tell)
            if tried.goodput < goal:
                break
            found, fewest = tried, number * device.gpus
    return found


def _like(asked: PlanQuestion, best: Tried, device: Device, number: int, tell: Tell) -> Tried:
    candidate = best.candidate
    one = colocated(
        number,
        candidate.step_tokens,
        store=candidate.has_store,
        shape=asked.shape(device),
        store_gib=candidate.store_gib,
    )
    return _tried(asked, one, asked.loads.first[:_SCREENED], tell)


def _flips(asked: PlanQuestion, found: Screening, tell: Tell) -> list[Flip]:
    """Return where the estimate changes with a higher rate, and with longer prompts.

    Prompts with known prefixes are left as they are: what longer ones would share is unknown.
    """
    rows = asked.loads.first[:_FLIP_REQUESTS]
    tried = [*found.colocated, *(one for one in found.others if one.candidate.is_usual)]
    candidates = [one.candidate for one in tried]
    most = asked.device.profile.model.max_context_tokens

    def pays_at_rate(scale: float) -> bool:
        return _pays(asked, candidates, faster(rows, scale))

    def pays_at_length(scale: float) -> bool | None:
        scaled = longer(rows, scale, most)
        is_whole = cut_share(scaled, most) <= cut_share(rows, most)
        return _pays(asked, candidates, scaled) if is_whole else None

    tell("flip points: rate")
    flips = find_flips("requests/s", rate_per_s(rows), pays_at_rate)
    if not asked.has_prefixes:
        tell("flip points: length of prompts")
        flips += find_flips("mean prompt tokens", mean_prompt(rows), pays_at_length)
    return flips


def _pays(asked: PlanQuestion, candidates: Sequence[Candidate], rows: Rows) -> bool:
    """Return whether the best split of these rows pays, by one run at predicted step times."""
    best = {True: 0.5 / len(rows), False: 0.5 / len(rows)}
    for one in candidates:
        goodput = asked.run(one, rows, asked.scenarios[1])["goodput_fraction"]
        best[one.is_colocated] = max(best[one.is_colocated], goodput)
    return best[False] / best[True] >= WORTH
