"""``banaserve plan``: advice whether to split prefill and decode for a load."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from banaserve.base.arguments import ABOVE_0, AT_LEAST_1, Rule, option
from banaserve.base.errors import UserError
from banaserve.base.figure_text import interval_text, number
from banaserve.base.statistics import Interval
from banaserve.cli.app import App
from banaserve.cli.simulate import measured_words
from banaserve.cli.terminal.console import print_json, print_rows
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.silicon import description as step_times
from banaserve.silicon.plan.advisor import (
    Advice,
    CounterOffer,
    Question,
    Result,
    Screening,
    advise,
    screen,
)
from banaserve.silicon.plan.flips import Flip
from banaserve.silicon.plan.gain import WORTH, Answer
from banaserve.silicon.plan.loads import read_loads
from banaserve.silicon.plan.trial import Device, StepError
from banaserve.sim.job import AskedSystem, SimulationJob, job
from banaserve.sim.report.result import SIMULATED

_LEAST_SEEDS = 2


@dataclass(frozen=True, kw_only=True)
class PlanOptions(AskedSystem):
    """Options of ``banaserve plan``: load and limits as of ``simulate``; the systems are found.

    Attributes:
        systems, policy, prefill, decode: No options here, since the search varies them.
    """

    systems: Sequence[str] = ()
    policy: str | None = None
    prefill: int | None = None
    decode: int | None = None
    instances: int | None = option(
        "number of instances (4; of a case: as many as its first system has)",
        None,
        int,
        rule=AT_LEAST_1,
    )
    step_times: Path | None = option(
        "description of measured step times, in place of those of the profile",
        None,
        Path,
        metavar="FILE",
    )
    step_error: float | None = option(
        "relative error of the step times, where it is known otherwise (that of --step-times)",
        None,
        float,
        rule=Rule(lambda value: 0 <= value <= 1, "must be between 0 and 1"),
    )
    elastic: bool = option("also try roles that follow the load: takes minutes", False)
    price: float | None = option("price of an instance for an hour", None, float, rule=ABOVE_0)
    seeds: int = option(
        "number of loads that judge, each drawn from the next seed or a part of the trace",
        5,
        rule=Rule(lambda value: value >= _LEAST_SEEDS, f"must be at least {_LEAST_SEEDS}"),
    )
    seed: int | None = option("the first seed", None, int)
    as_json: bool = option("print the advice as JSON", False, name="--json")


def plan_command(options: PlanOptions) -> int:
    """Say whether to split prefill and decode for a load, by simulating both.

    The answer is yes, no or can't tell. It is yes only where the interval of the gain over the best
    colocated instances is above 1, by the spread over loads and the error of the step times.
    """
    planned, asked = _question(options)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)

        def tell(words: str) -> None:
            progress.update(task, description=words)

        found = screen(asked, tell)
        progress.console.print(_first_words(found), highlight=False, soft_wrap=True)
        advice = advise(asked, found, tell)
    if options.as_json:
        print_json(_as_json(planned, asked, found, advice, options.price))
    else:
        _show(planned, asked, found, advice, options.price)
    return 0


def _question(options: PlanOptions) -> tuple[SimulationJob, Question]:
    """Read and check everything that is asked; nothing has run then.

    Raises:
        UserError: The load, the device or an option is invalid.
    """
    if not options.target:
        raise UserError("give a case, a trace or a dataset (see `banaserve simulate --list`)")
    planned = job(replace(options, instances=None))
    case = planned.case
    profile_name = options.profile or (case.profile_name if case else None)
    if profile_name is None:
        raise UserError(
            f"give --profile, the device and model to plan for: {', '.join(profiles.names())} or "
            "a .toml file"
        )
    if planned.events:
        raise UserError(f"{planned.name} has events: a plan is for instances that all serve")
    instances = options.instances
    if instances is None:
        instances = len(next(iter(planned.systems.values())).roles()) if case else 4
    measured = None if options.step_times is None else step_times.read(options.step_times)
    error = None if measured is None else StepError.of(measured.error)
    if options.step_error is not None:
        error = StepError(options.step_error, options.step_error)
    first = planned.seed if options.seed is None else options.seed
    return planned, Question(
        device=Device(planned.profile, measured),
        profile_name=profile_name,
        error=error,
        limits=planned.limits,
        loads=read_loads(planned, range(first, first + options.seeds)),
        instances=instances,
        has_elastic=options.elastic,
    )


def _first_words(found: Screening) -> str:
    best = found.colocated[0]
    words = f"first estimate, one load: {best.candidate.name}: {best.goodput:.1%} within the limits"
    if found.others:
        other = found.others[0]
        words += f"; {other.candidate.name}: {other.goodput:.1%}"
    return words


def sentence(advice: Advice, has_error: bool) -> str:
    """Return the answer with its reason, in one sentence."""
    rival, other, found = advice.rival.name, advice.challenger, advice.found
    if other is None or found is None:
        return f"no: one instance cannot be split; {rival} serves {_goodput(advice, rival)}"
    told = f"{_goodput(advice, other.name)} instead of {_goodput(advice, rival)}"
    times = f"{_interval(found.whole)} times as many requests within the limits as {rival}"
    if advice.answer is Answer.YES:
        return f"yes: {other.name} serves {times}: {told}"
    if advice.answer is Answer.NO:
        return f"no: the best other one, {other.name}, serves {times}: {told}"
    by_loads = f"if step times are right, {other.name} serves {_interval(found.of_loads)} times"
    by_loads += f" as many requests within the limits as {rival}"
    if not has_error:
        remedy = "give --step-times FILE, or --step-error if it is known"
        return f"can't tell: the error of these step times is unknown; {by_loads}: {remedy}"
    if found.of_loads.low > 1 or found.of_loads.high < WORTH:
        whole = _interval(found.whole)
        return f"can't tell: {by_loads}, and {whole} times with their errors, which decide"
    return f"can't tell: {by_loads}; loads differ too much: give more --seeds or longer loads"


def _goodput(advice: Advice, name: str) -> str:
    shares = [one["goodput_fraction"] for one in advice.results[name]]
    return f"{interval_text(shares, 100)}%"


def _interval(found: Interval) -> str:
    return f"{found.estimate:.2f} ({found.low:.2f} to {found.high:.2f})"


def _command(advice: Advice) -> str:
    return shlex.join(["banaserve", "serve", "MODEL", *advice.chosen.words])


def _costs(asked: Question, results: Sequence[Result], price: float, instances: int) -> list[float]:
    """Return the price of 1,000 requests within the limits, for each load that has any."""
    found = []
    for rows, one in zip(asked.loads.others, results, strict=True):
        if num_good := one["goodput_fraction"] * len(rows):
            found.append(price * instances * rows[-1].at_s / 3600 / num_good * 1000)
    return found


def _show(
    planned: SimulationJob,
    asked: Question,
    found: Screening,
    advice: Advice,
    price: float | None,
) -> None:
    print(sentence(advice, asked.error is not None))
    print()
    print(f"{planned.name}: {planned.about}")
    print(f"{SIMULATED}; profile {planned.profile.name} ({planned.profile.source})")
    measured = asked.device.measured
    if measured is not None:
        print(f"step times {measured.name} ({measured.source})")
        print(f"valid for {measured.valid_for}; errors are of {measured.judged_on}")
    kind = "parts of the trace" if asked.loads.are_windows else "loads"
    print(f"chosen on one, judged on {len(asked.loads.others)} other {kind}", end="")
    print("" if asked.error is None else f"; step times ±{asked.error.step:.1%}")
    if found.feasible_fraction < 1:
        print(f"an idle engine serves {found.feasible_fraction:.1%} of the requests in time")
    print()
    print_rows(list(_rows(asked, advice, price)), {})
    others = [_offer_words(one) for one in advice.offers] + list(map(_flip_words, advice.flips))
    if others:
        print("\nestimates of one load, at these step times:")
        print("\n".join(f"- {one}" for one in others))
    print(f"\n{_command(advice)}")


def _rows(asked: Question, advice: Advice, price: float | None) -> Iterator[tuple[str, ...]]:
    heading = ("arrangement", "goodput, %", "ttft p99, ms", "tpot p99, ms")
    yield heading if price is None else (*heading, "price of 1,000 in time")
    for name, results in advice.results.items():
        columns = (("goodput_fraction", 100.0), ("ttft_p99_s", 1e3), ("tpot_p99_s", 1e3))
        cells = [interval_text([one[key] for one in results], by) for key, by in columns]
        if price is not None:
            costs = _costs(asked, results, price, asked.instances)
            cells.append(interval_text(costs) if costs else "none in time")
        yield (name, *cells)


def _offer_words(offer: CounterOffer) -> str:
    offered, usual = offer.offered, offer.instead_of
    return (
        f"without a split: {offered.candidate.name}: {offered.goodput:.1%} in time instead of "
        f"{usual.goodput:.1%} of {usual.candidate.name}"
    )


def _flip_words(flip: Flip) -> str:
    side, value = ("above", flip.high) if flip.pays_above else ("below", flip.low)
    return (
        f"a split serves {WORTH - 1:.0%} more or better {side} {number(value, 2)} {flip.quantity}"
    )


def _as_json(
    planned: SimulationJob,
    asked: Question,
    found: Screening,
    advice: Advice,
    price: float | None,
) -> dict[str, Any]:
    measured, gained = asked.device.measured, advice.found
    num_instances = asked.instances
    return {
        "time": SIMULATED,
        "answer": advice.answer,
        "sentence": sentence(advice, asked.error is not None),
        "target": planned.name,
        "about": planned.about,
        "profile": planned.profile.name,
        "profile_source": planned.profile.source,
        "step_times": None if measured is None else measured_words(measured),
        "step_error": asked.error and asked.error._asdict(),
        "gain": gained and {key: one._asdict() for key, one in gained._asdict().items()},
        "feasible_fraction": found.feasible_fraction,
        "arrangements": {
            name: {
                "loads": results,
                "price_per_1000": price and _costs(asked, results, price, num_instances),
            }
            for name, results in advice.results.items()
        },
        "first_load": {one.candidate.name: one.result for one in (*found.colocated, *found.others)},
        "counter_offers": [
            {
                "kind": one.kind,
                "arrangement": one.offered.candidate.name,
                "goodput_fraction": one.offered.goodput,
                "instead_of": one.instead_of.candidate.name,
                "instead_of_goodput_fraction": one.instead_of.goodput,
            }
            for one in advice.offers
        ],
        "flip_points": [one._asdict() for one in advice.flips],
        "command": _command(advice),
    }


app = App(plan_command)
