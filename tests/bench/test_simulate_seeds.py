"""The tables beside the papers': claims name what is simulated, and are judged by it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from banaserve_bench.results.result import figure, result
from benchmarks.simulate_seeds import claims, report
from benchmarks.simulate_seeds import figures as seeds_figures
from benchmarks.simulate_seeds.cases import PAPERS

CASES = {case.name: case for make in PAPERS.values() for case in make()}


def test_every_claim_names_a_case_its_systems_and_a_measure() -> None:
    for claim in (one for each in claims.CLAIMS.values() for one in each):
        other = CASES[claim.other_case or claim.case]
        assert claim.system in CASES[claim.case].systems, claim
        assert not claim.other or claim.other in other.systems, claim
        assert claim.measure in seeds_figures.MEASURES, claim
        assert 0 < claim.low <= claim.high


@pytest.mark.parametrize(
    ("low", "high", "values", "expected"),
    [
        (1.1, 1.2, [1.15, 1.16, 1.15], "holds"),
        (1.1, 1.2, [1.9, 1.91, 1.9], "holds, and more"),
        (1.1, 1.2, [1.04, 1.041, 1.04], "in direction"),
        (1.1, 1.2, [0.9, 0.91, 0.9], "does not hold"),
        (0.8, 0.9, [0.5, 0.51, 0.5], "holds, and more"),
        (0.8, 0.9, [0.95, 0.951, 0.95], "in direction"),
        (0.8, 0.9, [1.3, 1.31, 1.3], "does not hold"),
        (1.0, claims.ANY, [1.02, 1.021, 1.02], "holds"),
        (1.1, 1.2, [0.98, 1.02, 1.0], "does not hold"),
        (1.0, claims.ANY, [0.9, 1.2, 1.1], "undecided"),
        (1.1, 1.2, [0.9, 1.3, 1.1], "undecided"),
        (0.8, 1.25, [0.9, 1.1, 1.0], "holds"),
        (1.0, claims.ANY, [0.97, 0.98, 0.97], "does not hold"),
    ],
)
def test_verdicts(low: float, high: float, values: list[float], expected: str) -> None:
    claim = claims.Claim("words", claims.CHAT, "skywalker", "hash", "hits", low, high)
    assert report.verdict(claim, values) == expected


def test_a_case_is_simulated_and_told_with_its_claims(monkeypatch: Any) -> None:
    case = CASES[claims.PUSH]
    short = case.setting.__class__(
        case.setting.replicas, {"us": [(2, case.setting.clients["us"][0][1])]}, duration_s=10.0
    )
    figures = seeds_figures.run(case.__class__(case.name, short, case.systems, case.paper), [0, 1])
    assert len(figures) == len(case.systems) * len(seeds_figures.MEASURES)
    record = result(
        "simulate_seeds",
        seed=0,
        options={"seeds": 2},
        started_at=datetime(2030, 1, 2, tzinfo=UTC),
        figures=figures,
    )
    page = report.markdown(record)
    assert "pushing by pending over blind" in page
    assert f"### {claims.PUSH}" in page
    assert claims.CHAT not in page
    ours = figures[seeds_figures.figure_name(case.name, "SP-P", "weighted")]
    theirs = figures[seeds_figures.figure_name(case.name, "blind", "weighted")]
    claim = claims.CLAIMS["SkyWalker"][0]
    assert report.samples(claim, figures)[0] == ours.samples[0] / theirs.samples[0]


def test_a_value_that_is_no_ratio_is_judged_as_it_is() -> None:
    claim = claims.Claim("hits", claims.CHAT, "skywalker", "", "hits", 0.37, 0.47)
    name = seeds_figures.figure_name(claims.CHAT, "skywalker", "hits")
    figures = {name: figure([0.5, 0.51], "fraction")}
    assert report.has(claim, figures)
    assert "| 0.37 to 0.47 |" in report.row(claim, figures)
    assert report.verdict(claim, [0.9, 0.901]) == "does not hold"
