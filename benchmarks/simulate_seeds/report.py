"""Page with each claim of the papers beside the simulator's figures, and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from banaserve.sim.result import SIMULATED
from banaserve_bench.report.tables import as_markdown
from banaserve_bench.results.figure_text import interval_text
from banaserve_bench.results.result import Figure, Result, figure
from banaserve_bench.results.statistics import paired_ratios
from benchmarks.simulate_seeds.cases import PAPERS, PaperCase
from benchmarks.simulate_seeds.claims import (
    ANY,
    CLAIMS,
    NOT_TESTABLE,
    REPRODUCED,
    RULE,
    VERDICTS,
    Claim,
    UntestableClaim,
    interval,
    verdict,
)
from benchmarks.simulate_seeds.figures import MEASURES, figure_name

Figures = Mapping[str, Figure]
_LOADS = {case.name: case.load for make in PAPERS.values() for case in make()}


def markdown(record: Result) -> str:
    """Return the page of a result; a claim or case that it lacks is left out."""
    figures, seeds = record.figures, record.options["seeds"]
    lines = [
        "# Claims of SkyWalker, GORGO and Preble",
        "",
        f"Made of [simulate-seeds.json](simulate-seeds.json). **{SIMULATED.capitalize()}.**",
        "",
        f"{seeds} seeds, in some cases two or three times as many. All systems of a seed meet the",
        "same clients, on the loads of `bench routers` (GSM8K, MT-bench, ToolBench, ALFWorld,",
        "LooGLE, HumanEval, coding agents, traces of Mooncake and Azure). Hardware times and",
        "distances are assumed, so ratios are to be read, not values. Throughput is the prompt's",
        "tokens and twice the output's, a second.",
        "",
        RULE,
        "",
        totals(figures),
        *claims_tables(figures),
    ]
    for paper, cases in PAPERS.items():
        lines += ["", f"## Tables: {paper}"]
        for case in cases():
            if figure_name(case.name, next(iter(case.systems)), "output") not in figures:
                continue
            lines += ["", f"### {case.name}", "", f"{case.load}.", "", case_table(case, figures)]
    return "\n".join(lines) + "\n"


def case_table(case: PaperCase, figures: Figures) -> str:
    """Return a table of means with their 95% intervals (Student): systems as rows."""
    table = [["", *MEASURES]]
    for name in case.systems:
        found = (figures[figure_name(case.name, name, one)].samples for one in MEASURES)
        table.append([name, *map(interval_text, found)])
    return as_markdown(table)


def totals(figures: Figures) -> str:
    """Return a table of the number of claims by paper and verdict."""
    counts = verdict_figures(figures)
    rows = (
        [one, *(f"{counts[f'{one} | {said}'].median:g}" for said in VERDICTS)] for one in CLAIMS
    )
    return as_markdown([["", *VERDICTS], *rows])


def verdict_figures(figures: Figures) -> dict[str, Figure]:
    """Return the number of claims of each paper by verdict."""
    found = {}
    for paper, claims in CLAIMS.items():
        counts = Counter(judged(one, figures) for one in claims if has(one, figures))
        for one in VERDICTS:
            found[f"{paper} | {one}"] = figure([float(counts[one])], "claims")
    return found


def claims_tables(figures: Figures) -> Iterator[str]:
    """Yield the lines of a section for each paper, with all claims that ``figures`` can judge.

    Cells are not padded: some have a sentence.
    """
    for paper, claims in CLAIMS.items():
        yield f"\n## {paper}\n\n| Source | Claim | Load | Paper | Here | Verdict |"
        yield "| --- | --- | --- | --- | --- | --- |"
        yield from (row(one, figures) for one in claims if has(one, figures))


def has(claim: Claim | UntestableClaim, figures: Figures) -> bool:
    """Return whether ``figures`` have what ``claim`` needs."""
    return isinstance(claim, UntestableClaim) or all(name in figures for name in _names(claim))


def judged(claim: Claim | UntestableClaim, figures: Figures) -> str:
    if isinstance(claim, UntestableClaim):
        return NOT_TESTABLE
    return verdict(claim, samples(claim, figures))


def row(claim: Claim | UntestableClaim, figures: Figures) -> str:
    """Return a line of the table of claims."""
    if isinstance(claim, UntestableClaim):
        why = f"{NOT_TESTABLE}: {claim.why}"
        return f"| {claim.source} | {claim.words} | | {claim.paper} | | {why} |"
    low, mean, high = interval(claim, samples(claim, figures))
    found = f"{mean:.3g} ({low:.3g} to {high:.3g})"
    word = judged(claim, figures)
    why = f": {claim.why}" if claim.why and word != REPRODUCED else ""
    said, load = _range(claim.low, claim.high), _LOADS[claim.case]
    return f"| {claim.source} | {claim.words} | {load} | {said} | {found} | {word}{why} |"


def samples(claim: Claim, figures: Figures) -> list[float]:
    """Return the ratio of each seed, or the value if the claim is no ratio."""
    names = _names(claim)
    ours = figures[names[0]].samples
    return paired_ratios(ours, figures[names[1]].samples) if claim.other else list(ours)


def _names(claim: Claim) -> list[str]:
    names = [figure_name(claim.case, claim.system, claim.measure)]
    if claim.other:
        case = claim.other_case or claim.case
        names.append(figure_name(case, claim.other, claim.measure))
    return names


def _range(low: float, high: float) -> str:
    if high == ANY:
        return f"above {low:g}"
    if not low:
        return f"below {high:g}"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
