"""Figures of the result of ``simulate-paper``, and its page and plots, made of the result alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from banaserve.sim.result import SIMULATED
from banaserve_bench.report import plots
from banaserve_bench.report.plots import Plot, PlotGrid, Series
from banaserve_bench.report.tables import as_markdown
from banaserve_bench.results.result import Figure, Result
from banaserve_bench.results.statistics import Interval, mean_interval, paired_ratios
from benchmarks import measurement
from benchmarks.simulate_paper.runs import (
    FIGURES,
    LIMIT_FACTOR,
    RATES,
    READINGS,
    SEEDS,
    SPLITS,
    SYSTEMS,
    PaperFigure,
    PaperRun,
)

Found = Mapping[str, float]
Runs = Sequence[tuple[PaperRun, Found]]
Samples = dict[tuple[int, str, str, float], list[Found]]
Place = tuple[PaperFigure, str]
"""Figure and reading."""

METRICS = (
    ("tokens_per_s", "throughput", "tokens/s"),
    ("goodput_fraction", "goodput", "share of requests"),
    ("total_s", "total time", "s"),
    ("latency_s", "mean latency", "s"),
)
_SATURATED_BELOW = 0.9
"""Share of the offered tokens below which a system counts as saturated."""

_OURS = ("banaserve", "elastic")

MEANINGS = (
    "throughput is of tokens, whenever they come; goodput is the share of the requests that came "
    f"after the warm-up whose first token and whose mean time per further token came within "
    f"{LIMIT_FACTOR:g} times what they are on average where a request is alone on an engine: one "
    "rule for all cells",
    "the elastic policy plans by those limits, for goodput and not for throughput; no other system "
    "knows them",
    "hosts and guests of moved modules overlap as engines let them unless told otherwise",
)
"""Meanings of the figures, a sentence each."""


def figures_of(runs: Runs) -> measurement.Samples:
    """Return what is offered, every metric of every system and rate, and ratios of throughput."""
    samples: Samples = defaultdict(list)
    for run, found in sorted(runs, key=lambda entry: entry[0].seed):
        samples[run.figure, run.reading, run.system, run.rate_per_s].append(found)
    figures: measurement.Samples = {}
    for key, outcomes in sorted(samples.items()):
        number, reading, system, rate = key
        name = _name(key)
        offered = [f["offered_tokens_per_s"] for f in outcomes]
        figures[_offered_name(number, reading, rate)] = offered, "tokens/s"
        for metric, _, unit in METRICS:
            figures[f"{name}_{metric}"] = [f[metric] for f in outcomes], unit
        if system in _OURS:
            for other in ("static", "colocated"):
                values = ratios(samples, key, other)
                figures[f"{name}_over_{other}"] = values, "times"
    return figures


def samples_of(figures: Mapping[str, Figure]) -> Samples:
    """Return the outcomes by figure, reading, system and rate, in the order of the seeds."""
    samples: Samples = {}
    for key in product((f.number for f in FIGURES), READINGS, (*SYSTEMS, *SPLITS), RATES):
        number, reading, _, rate = key
        named = {metric: f"{_name(key)}_{metric}" for metric, _, _ in METRICS}
        named["offered_tokens_per_s"] = _offered_name(number, reading, rate)
        if f"{_name(key)}_tokens_per_s" in figures:  # splits have runs at one rate
            rows = zip(*(figures[name].samples for name in named.values()), strict=True)
            samples[key] = [dict(zip(named, row, strict=True)) for row in rows]
    return samples


def ratios(samples: Samples, key: tuple[int, str, str, float], other: str) -> list[float]:
    """Return one ratio of throughput for each seed: both systems get the same requests."""
    figure, reading, _, rate = key
    theirs, ours = samples[figure, reading, other, rate], samples[key]
    return paired_ratios([f["tokens_per_s"] for f in ours], [f["tokens_per_s"] for f in theirs])


def _name(key: tuple[int, str, str, float]) -> str:
    figure, reading, system, rate = key
    return f"fig{figure}_{reading}_{system.replace(' ', '_').replace(':', '_')}_{rate:g}rps"


def _offered_name(figure: int, reading: str, rate: float) -> str:
    return f"fig{figure}_{reading}_{rate:g}rps_offered_tokens_per_s"


def markdown(record: Result) -> str:
    """Return the page of a result."""
    samples = samples_of(record.figures)
    lines = [*_HEAD.splitlines(), "", *(f"- {note}." for note in record.notes)]
    for part in (_summary(samples), _goodput(record, samples), _needed(samples), _splits(samples)):
        lines += ["", *part]
    lines.append("")
    for figure in FIGURES:
        lines += [f"## F{figure.name[1:]}", "", f"![]({picture_name(figure)})"]
        for reading in READINGS:
            lines += ["", *_table(samples, (figure, reading))]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def picture_name(figure: PaperFigure) -> str:
    """Return the name of the file of a figure's plot, beside the page."""
    return f"simulate-paper-figure{figure.number}.svg"


_HEAD = f"""# BanaServe's figures 8 to 11, simulated

Made of [simulate-paper.json](simulate-paper.json). **{SIMULATED.capitalize()}.**

Systems with four GPUs each get the same Poisson arrivals, {RATES[0]} to {RATES[-1]} requests
a second, with {len(SEEDS)} seeds; intervals are 95%. *colocated* is a vLLM on every GPU, *static*
has two prefill and two decode instances (DistServe), *banaserve* begins so and has the global
store and the repaired migration policy, *elastic* begins with four that do both and has the store
and the elastic policy, as `banaserve simulate` and `serve --elastic` have it. All have the same
simulated engine, and no constant differs from figure to figure: OPT-13B is DistServe's fit of an
A100-80G, Llama-13B an estimate from it. Prompts and answers have the measured lengths of Alpaca and
LongBench; prompts are cut to the model's context (2,048 and 4,096 tokens). Throughput counts the
tokens that come after a minute of warm-up while requests still arrive, total time runs from the
first arrival to the last token, latency and goodput are of the requests that came after the
warm-up. The paper does not say how many GPUs it used, how its baselines were set up or how long
answers were, so there are two readings, *reference* and *capped*:"""


def _summary(samples: Samples) -> list[str]:
    heading = ["Figure", "Reading"]
    for other, baseline in (("static", "DistServe"), ("colocated", "vLLM")):
        heading += [*(f"{system} over {other}" for system in _OURS), f"the paper: over {baseline}"]
    table = [[*heading, "below saturation"]]
    for place, cells in _places():
        figure, _ = place
        below: list[float] = []
        for other, paper in (("static", figure.over_static), ("colocated", figure.over_colocated)):
            for system in _OURS:
                means = _mean_ratios(samples, place, system, other)
                cells.append(_span(list(means.values())))
                if system == "banaserve":
                    below += [
                        mean
                        for rate, mean in means.items()
                        if all(_served(samples, place, s, rate) for s in (system, other))
                    ]
            cells.append(
                f"up to {paper[1]:g}" if paper[0] == 1 else f"{paper[0]:g} to {paper[1]:g}"
            )
        table.append([*cells, _span(below)])
    return [
        "## Ratios of throughput",
        "",
        "The lowest and the highest mean ratio over all rates; *below saturation* is that of",
        "banaserve over those rates at which both systems serve at least",
        f"{_SATURATED_BELOW:.0%} of the offered tokens.",
        "",
        as_markdown(table),
    ]


def _places() -> Iterator[tuple[Place, list[str]]]:
    """Yield each figure with each reading, and the cells that begin its row of a table."""
    for figure, reading in product(FIGURES, READINGS):
        yield (figure, reading), [f"{figure.number}: {figure.model}, {figure.dataset}", reading]


def _at(samples: Samples, place: Place, system: str, rate: float) -> list[Found]:
    figure, reading = place
    return samples[figure.number, reading, system, rate]


def _mean_ratios(samples: Samples, place: Place, system: str, other: str) -> dict[float, float]:
    """Return the mean ratio of throughput at each rate."""
    figure, reading = place
    found: dict[float, float] = {}
    for rate in RATES:
        values = ratios(samples, (figure.number, reading, system, rate), other)
        found[rate] = mean_interval(values).estimate
    return found


def _goodput(record: Result, samples: Samples) -> list[str]:
    table = [["Figure", "Reading", "limit of TTFT", "limit of TPOT", *SYSTEMS]]
    for place, cells in _places():
        limits = record.raw[limits_name(*place)]
        cells += [f"{limits['ttft_s']:.3g} s", f"{1e3 * limits['tpot_s']:.0f} ms"]
        for system in SYSTEMS:
            shares = (
                _mean(_at(samples, place, system, rate), "goodput_fraction") for rate in RATES
            )
            cells.append(", ".join(f"{share:.2f}" for share in shares))
        table.append(cells)
    rates = ", ".join(f"{rate:g}" for rate in RATES)
    return [
        "## Goodput",
        "",
        f"Share of the requests within the limits at {rates} requests a second, means over the",
        "seeds.",
        "",
        as_markdown(table),
    ]


def limits_name(figure: PaperFigure, reading: str) -> str:
    """Return the name of the limits of a cell among the raw data of a result."""
    return f"fig{figure.number}_{reading}_limits"


def _mean(found: Sequence[Found], metric: str) -> float:
    return sum(f[metric] for f in found) / len(found)


def _span(values: Sequence[float]) -> str:
    if not values:
        return "none"
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _served(samples: Samples, place: Place, system: str, rate: float) -> bool:
    found = _at(samples, place, system, rate)
    served = sum(f["tokens_per_s"] for f in found) / sum(f["offered_tokens_per_s"] for f in found)
    return served >= _SATURATED_BELOW


def _needed(samples: Samples) -> list[str]:
    """Return why ratios of the paper are not reached, from the numbers of these runs."""
    lines = ["## Where the paper's ratios are not reached, and what would be needed", ""]
    for place, _ in _places():
        lines += _needed_of(samples, place)
    return lines


def _needed_of(samples: Samples, place: Place) -> Iterator[str]:
    figure, reading = place
    for other, theirs, wanted in (
        ("static", "DistServe", figure.over_static[1]),
        ("colocated", "vLLM", figure.over_colocated[1]),
    ):
        best = max(_mean_ratios(samples, place, "banaserve", other).values())
        words = "Reached." if best >= wanted else _missing(samples, place, other, wanted)
        yield (
            f"- Figure {figure.number}, {reading}, over {theirs}: {best:.2f} at most, the paper "
            f"has up to {wanted:g}. {words}"
        )


def _missing(samples: Samples, place: Place, other: str, wanted: float) -> str:
    """Return what would have to be different to reach ``wanted``."""
    full = [rate for rate in RATES if not _served(samples, place, other, rate)]
    if not full:
        first = RATES[-1] / wanted
        return (
            f"At {RATES[-1]} requests a second {other} still serves what is offered, and no system "
            f"can serve more: it would have to be saturated from {first:.1f} requests a second on, "
            "with fewer or slower GPUs or longer answers."
        )
    theirs, ours = _most(samples, place, other), _most(samples, place, "banaserve")
    return (
        f"From {full[0]} requests a second on {other} is saturated; it serves {theirs:.0f} "
        f"tokens/s at most and banaserve {ours:.0f} with as many GPUs, so either banaserve would "
        f"have to reach {wanted * theirs:.0f}, or {other} be held to {ours / wanted:.0f}."
    )


def _most(samples: Samples, place: Place, system: str) -> float:
    return max(_mean(_at(samples, place, system, rate), "tokens_per_s") for rate in RATES)


def _splits(samples: Samples) -> list[str]:
    rate, systems = RATES[-1], (*SYSTEMS, *SPLITS)
    table = [["Figure", "Reading", *systems]]
    for place, cells in _places():
        found = (_at(samples, place, system, rate) for system in systems)
        table.append([*cells, *(_shown(one, "tokens_per_s") for one in found)])
    return [
        "## What the split of the GPUs is worth",
        "",
        f"Tokens a second at {rate} requests a second. The right columns begin with another split",
        "of the four GPUs into prefill and decode.",
        "",
        as_markdown(table),
    ]


def _table(samples: Samples, place: Place) -> list[str]:
    table = [["requests/s", "system", *(f"{words}, {unit}" for _, words, unit in METRICS)]]
    for rate, system in product(RATES, SYSTEMS):
        found = _at(samples, place, system, rate)
        table.append([f"{rate:g}", system, *(_shown(found, metric) for metric, _, _ in METRICS)])
    return [f"Reading *{place[1]}*:", "", as_markdown(table)]


def _shown(found: Sequence[Found], metric: str) -> str:
    low, mean, high = _interval(found, metric)
    return f"{_number(mean)} ± {_number((high - low) / 2)}"


def _interval(found: Sequence[Found], metric: str) -> Interval:
    return mean_interval([f[metric] for f in found])


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def picture(record: Result, figure: PaperFigure) -> str:
    """Return one figure as SVG: readings as rows, metrics as columns."""
    samples = samples_of(record.figures)

    def series(reading: str, metric: str) -> Iterator[Series]:
        for system in SYSTEMS:
            found = (_at(samples, (figure, reading), system, rate) for rate in RATES)
            ends = [_interval(one, metric) for one in found]
            points = list(zip(RATES, (one.estimate for one in ends), strict=True))
            yield Series(system, points, [(one.low, one.high) for one in ends])

    drawn = [
        Plot(f"{words}, {reading} answers", "requests a second", unit, [*series(reading, metric)])
        for reading in READINGS
        for metric, words, unit in METRICS
    ]
    title = f"Simulated, after the paper's {figure.name}"
    return plots.svg(PlotGrid(title, drawn, num_columns=len(METRICS)))
