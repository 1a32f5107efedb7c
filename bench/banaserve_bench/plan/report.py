"""Report of an advice, as text and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from banaserve.cli.terminal.console import print_rows
from banaserve.sim.result import SIMULATED
from banaserve_bench.plan.search.advisor import Advice, CounterOffer, Result, Screening
from banaserve_bench.plan.search.engines import device_words
from banaserve_bench.plan.search.flips import Flip
from banaserve_bench.plan.search.gain import MOST_RATIO, WORTH, Answer
from banaserve_bench.plan.search.loads import rate_per_s
from banaserve_bench.plan.search.question import PlanQuestion
from banaserve_bench.results.figure_text import interval_text, number
from banaserve_bench.results.statistics import Interval
from banaserve_bench.simulation.command import measured_words
from banaserve_bench.simulation.job import SimulationJob

_OVERLOADED = 0.5
"""Share of requests in time below which the load is too much for every candidate."""
_COLUMNS = (
    ("in time, %", "goodput_fraction", 100.0),
    ("ttft p99, ms", "ttft_p99_s", 1e3),
    ("tpot p99, ms", "tpot_p99_s", 1e3),
)


def first_words(found: Screening) -> str:
    """Return what one load shows, before anything is judged."""
    best = [group[0] for group in (found.colocated, found.others) if group]
    shares = [f"{one.candidate.name} {one.goodput:.1%} in time" for one in best]
    return f"first estimate, of one load: {', '.join(shares)}"


class PlanReport(NamedTuple):
    """Advice, and what was asked.

    Attributes:
        price: Price of an instance, or of a GPU where these are known, for an hour; None if it is
            unknown.
        model: Model that is served, as ``serve`` gets it.
        past_words: Errors that earlier advice has had, in one line.
    """

    planned: SimulationJob
    asked: PlanQuestion
    found: Screening
    advice: Advice
    price: float | None
    model: str = "MODEL"
    past_words: str = ""

    @property
    def sentence(self) -> str:
        """Answer with its reason, in one sentence."""
        advice, rival = self.advice, self.advice.rival.name
        other, found = advice.challenger, advice.found
        if other is None or found is None:
            return f"no: one instance cannot be split; {rival} serves {self._in_time(rival)}"
        told = f"{self._in_time(other.name)} instead of {self._in_time(rival)}"
        more = f"{_text(found.whole)} times as many requests in time as {rival}"
        if advice.answer is Answer.YES:
            return f"yes: {other.name} serves {more}: {told}"
        if advice.answer is Answer.NO:
            return f"no: the best other one, {other.name}, serves {more}: {told}"
        words = f"can't tell: if step times are right, {other.name} serves {_text(found.of_loads)} "
        words += f"times as many requests in time as {rival}"
        if self.asked.error is None:
            remedy = "give --step-times FILE, or --step-error if you know it"
            return f"{words}, but their error is unknown: {remedy}"
        if found.of_loads.low > 1 or found.of_loads.high < WORTH:
            return f"{words}, with their errors {_text(found.whole)} times: more exact ones decide"
        return f"{words}: give longer loads, or more of them (--seeds)"

    @property
    def command(self) -> str:
        return shlex.join(["banaserve", "serve", self.model, *self.advice.chosen.words])

    @property
    def expected(self) -> str:
        """Figures that are expected of the chosen system, with their intervals over loads."""
        name = self.advice.chosen.name
        results = self.advice.results[name]
        loads = zip(self.asked.loads.others, results, strict=True)
        rates = [one["goodput_fraction"] * rate_per_s(rows) for rows, one in loads]
        parts = [f"{interval_text(rates)} requests/s in time"]
        for words, key in (("TTFT p99", "ttft_p99_s"), ("TPOT p99", "tpot_p99_s")):
            parts.append(f"{words} {interval_text([one[key] for one in results], 1e3)} ms")
        if prices := self.prices(results):
            parts.append(f"{interval_text(prices)} for 1,000 requests in time")
        return f"expected of {name}: {', '.join(parts)}"

    def show(self) -> None:
        """Print the report, the answer first."""
        planned = self.planned
        print(f"{self.sentence}\n{self.expected}\n\n{planned.name}: {planned.about}")
        print("\n".join(self.facts()))
        print()
        print_rows(list(self.rows()), {})
        if self.advice.sensitivities:
            print()
            print_rows(list(self.sensitivity_rows()), {})
        if estimates := self.estimates():
            print("\nestimates of one load, at these step times:")
            print("\n".join(f"- {one}" for one in estimates))
        print(f"\n{self.command}")

    def facts(self) -> Iterator[str]:
        """Yield what the advice rests on: devices, step times and loads."""
        asked, planned, measured = self.asked, self.planned, self.asked.device.measured
        others = asked.loads.others
        yield f"{SIMULATED}; profile {planned.profile.name} ({planned.profile.source})"
        yield from device_words(asked.devices)
        if measured is not None:
            longest = max(r.prompt_tokens + r.output_tokens for rows in others for r in rows)
            yield f"step times {measured.name} ({measured.source})"
            yield f"valid for {measured.valid_for}; the longest request has {longest} tokens"
            yield f"errors are of {measured.judged_on}"
        kind = "parts of the trace" if asked.loads.are_windows else "loads"
        error = "unknown" if asked.error is None else f"{asked.error.step:.1%}"
        yield f"chosen on one, judged on {len(others)} other {kind}; error of step times: {error}"
        if self.past_words:
            yield self.past_words
        if self.found.feasible_fraction < 1:
            share = f"{self.found.feasible_fraction:.1%}"
            yield f"an idle engine serves {share} of the requests in time"

    def estimates(self) -> list[str]:
        """Return what an overload needs, counter-offers and flip points, each as a line."""
        found = [*map(_offer_words, self.advice.offers), *map(_flip_words, self.advice.flips)]
        best = max(one.goodput for one in (*self.found.colocated, *self.found.others))
        if best < _OVERLOADED:
            words = "this is an overload, in which ratios say little: give more GPUs, or less load"
            found.insert(0, f"no system serves more than {best:.1%} in time; {words}")
        return found

    def sensitivity_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield a heading, and a row for each question that differs a little, of one load."""
        yield ("if", "answer", "times as many in time")
        for one in self.advice.sensitivities:
            yield (one.change, one.answer, _text(one.gain))

    def as_json(self) -> dict[str, Any]:
        """Return the report for JSON; results are of each load that judges, in their order."""
        planned, asked, advice = self.planned, self.asked, self.advice
        measured, gained = asked.device.measured, advice.found
        return {
            "time": SIMULATED,
            "answer": advice.answer,
            "sentence": self.sentence,
            "expected": self.expected,
            "command": self.command,
            "target": planned.name,
            "about": planned.about,
            "profile": planned.profile.name,
            "profile_source": planned.profile.source,
            "step_times": measured and measured_words(measured),
            "step_error": asked.error,
            "gain": gained and {"whole": _ends(gained.whole), "of_loads": _ends(gained.of_loads)},
            "feasible_fraction": self.found.feasible_fraction,
            "results": advice.results,
            "prices_of_1000": {name: self.prices(of) for name, of in advice.results.items()},
            "first_load": {
                one.candidate.name: one.result
                for one in (*self.found.colocated, *self.found.others)
            },
            "counter_offers": [
                {
                    "kind": one.kind,
                    "system": one.offered.candidate.name,
                    "goodput_fraction": one.offered.goodput,
                    "instead_of": one.instead_of.candidate.name,
                    "its_goodput_fraction": one.instead_of.goodput,
                }
                for one in advice.offers
            ],
            "flip_points": advice.flips,
            "sensitivities": [
                {"change": one.change, "answer": one.answer, "gain": _ends(one.gain)}
                for one in advice.sensitivities
            ],
            "devices": [
                {
                    "gpus": one.gpus,
                    "profile": one.profile.name,
                    "kv_tokens": one.profile.memory.kv_tokens,
                    "bytes_per_s": one.profile.link.bytes_per_s,
                }
                for one in asked.devices
            ],
        }

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield a heading, and a row for each system that was judged."""
        heading = ("system", *(words for words, _, _ in _COLUMNS))
        yield heading if self.price is None else (*heading, "price of 1,000 in time")
        for name, results in self.advice.results.items():
            cells = [interval_text([one[key] for one in results], by) for _, key, by in _COLUMNS]
            if self.price is not None:
                prices = self.prices(results)
                cells.append(interval_text(prices) if prices else "none in time")
            yield (name, *cells)

    def prices(self, results: Sequence[Result]) -> list[float]:
        """Return the price of 1,000 requests within the limits, for each load that has any."""
        found = []
        for rows, one in zip(self.asked.loads.others, results, strict=True):
            num_good = one["goodput_fraction"] * len(rows)
            if self.price is not None and num_good:
                hours = rows[-1].at_s / 3600
                found.append(1000 * self.price * self.asked.num_gpus * hours / num_good)
        return found

    def _in_time(self, name: str) -> str:
        shares = [one["goodput_fraction"] for one in self.advice.results[name]]
        return f"{interval_text(shares, 100)}%"


def _ends(found: Interval) -> dict[str, float]:
    return {"low": found.low, "estimate": found.estimate, "high": found.high}


def _text(found: Interval) -> str:
    to = "or more" if found.high >= MOST_RATIO else f"to {found.high:.2f}"
    return f"{found.estimate:.2f} ({found.low:.2f} {to})"


def _offer_words(offer: CounterOffer) -> str:
    offered, usual = offer.offered, offer.instead_of
    return (
        f"without a split: {offered.candidate.name}: {offered.goodput:.1%} in time, with "
        f"{usual.candidate.name} {usual.goodput:.1%}"
    )


def _flip_words(flip: Flip) -> str:
    side, value = ("above", flip.high) if flip.pays_above else ("below", flip.low)
    return f"a split serves {WORTH - 1:.0%} more {side} {number(value, 2)} {flip.quantity}"
