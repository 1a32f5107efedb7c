"""Page with each claim of the papers beside the simulator's figures, and tables."""

from __future__ import annotations

from collections.abc import Mapping

from banaserve.sim.result import SIMULATED
from banaserve_bench.results.result import Figure, Result
from banaserve_bench.results.statistics import mean_interval, paired_ratios
from benchmarks.simulate_seeds.cases import PAPERS
from benchmarks.simulate_seeds.claims import ANY, CLAIMS, Claim
from benchmarks.simulate_seeds.figures import MEASURES, cell, figure_name

Figures = Mapping[str, Figure]


def markdown(record: Result) -> str:
    """Return the page of a result; a claim or case that it lacks is left out."""
    figures, seeds = record.figures, record.options["seeds"]
    lines = [
        "# SkyWalker, GORGO and Preble, simulated",
        "",
        f"Made of [simulate-seeds.json](simulate-seeds.json). **{SIMULATED.capitalize()}.**",
        "",
        f"{seeds} seeds; a ratio is taken seed by seed, and its interval is 95 % (Student). All",
        "systems of a seed meet the same clients. What the papers do not give (hardware times,",
        "lengths, distances) is assumed, so ratios are to be read, not values. *Holds*: the",
        "interval meets the paper's. *In direction*: on the paper's side of 1, and less.",
        "*Undecided*: the interval has 1 in it as well.",
        "Throughput is the prompt's tokens and twice the output's, a second.",
        "Balancers are compared, over replicas whose modules stay: overlap of hosts and guests is",
        "in no figure.",
    ]
    for paper, claims in CLAIMS.items():
        lines += ["", f"## {paper}", "", "| Case | Claim | Paper | Simulated | |"]
        lines.append("| --- | --- | --- | --- | --- |")
        lines += [row(one, figures) for one in claims if has(one, figures)]
    for paper, cases in PAPERS.items():
        lines += ["", f"## Tables: {paper}"]
        for case in cases():
            if figure_name(case.name, next(iter(case.systems)), "output") not in figures:
                continue
            lines += ["", f"### {case.name}", "", f"Paper: {case.paper}.", ""]
            lines.append(f"| | {' | '.join(MEASURES)} |")
            lines.append("| --- " * (len(MEASURES) + 1) + "|")
            for name in case.systems:
                cells = [
                    cell(figures[figure_name(case.name, name, one)].samples) for one in MEASURES
                ]
                lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def has(claim: Claim, figures: Figures) -> bool:
    """Return whether ``figures`` have what ``claim`` needs."""
    return all(name in figures for name in _names(claim))


def row(claim: Claim, figures: Figures) -> str:
    """Return a line of the table of claims."""
    values = samples(claim, figures)
    low, mean, high = mean_interval(values)
    said = _range(claim.low, claim.high)
    found = f"{mean:.2f} ({low:.2f} to {high:.2f})"
    judged = verdict(claim, values)
    why = f": {claim.why}" if claim.why and judged != "holds" else ""
    return f"| {claim.case} | {claim.words} | {said} | {found} | {judged}{why} |"


def samples(claim: Claim, figures: Figures) -> list[float]:
    """Return the ratio of each seed, or the value if the claim is no ratio."""
    names = _names(claim)
    ours = figures[names[0]].samples
    return paired_ratios(ours, figures[names[1]].samples) if claim.other else list(ours)


def verdict(claim: Claim, values: list[float]) -> str:
    """Return the verdict of ``values`` on ``claim``."""
    low, mean, high = mean_interval(values)
    if low <= claim.high and high >= claim.low:
        is_decisive = claim.low > 1 or claim.high < 1 or claim.high == ANY
        return "undecided" if claim.other and is_decisive and low < 1 < high else "holds"
    if claim.other:
        is_above = claim.low >= 1
        if mean > claim.high if is_above else mean < claim.low:
            return "holds, and more"
        if low > 1 if is_above else high < 1:
            return "in direction"
    return "does not hold"


def _names(claim: Claim) -> list[str]:
    names = [figure_name(claim.case, claim.system, claim.measure)]
    if claim.other:
        case = claim.other_case or claim.case
        names.append(figure_name(case, claim.other, claim.measure))
    return names


def _range(low: float, high: float) -> str:
    if high == ANY:
        return f"above {low:g}"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
