"""The tables beside the papers': claims name what is simulated, and are judged by it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import zstandard

from banaserve_bench.results.result import figure, read, result
from benchmarks.results_page import RESULTS
from benchmarks.simulate_seeds import cases, claims, report
from benchmarks.simulate_seeds import figures as seeds_figures
from benchmarks.simulate_seeds.claims import NOT_REPRODUCED, REPRODUCED, UNDECIDED, Claim

CASES = {case.name: case for make in cases.PAPERS.values() for case in make()}
ALL = [one for each in claims.CLAIMS.values() for one in each]


def claim_of(low: float, high: float, other: str = "hash", measure: str = "weighted") -> Claim:
    return Claim("1", "words", cases.CHAT, "skywalker", other, measure, low, high)


def test_every_claim_names_a_case_its_systems_and_a_measure() -> None:
    assert claims.CLAIMS.keys() == cases.PAPERS.keys()
    for claim in ALL:
        if isinstance(claim, Claim):
            other = CASES[claim.other_case or claim.case]
            assert claim.system in CASES[claim.case].systems, claim
            assert not claim.other or claim.other in other.systems, claim
            assert claim.measure in seeds_figures.MEASURES, claim
            assert 0 <= claim.low <= claim.high


@pytest.mark.parametrize(
    ("claim", "values", "expected"),
    [
        # Half of the effect of 1.21 is 1.1.
        (claim_of(1.21, 1.5), [1.15, 1.16, 1.15], REPRODUCED),
        (claim_of(1.21, 1.5), [9.0, 9.01, 9.0], REPRODUCED),
        (claim_of(1.21, 1.5), [1.04, 1.041, 1.04], NOT_REPRODUCED),
        (claim_of(1.21, 1.5), [1.0, 1.3, 1.1], UNDECIDED),
        (claim_of(1.21, 1.5), [1.098, 1.101, 1.102], NOT_REPRODUCED),
        (claim_of(0.5, 0.81), [0.85, 0.851, 0.85], REPRODUCED),
        (claim_of(0.5, 0.81), [0.95, 0.951, 0.95], NOT_REPRODUCED),
        (claim_of(1.0, claims.ANY), [1.02, 1.021, 1.02], REPRODUCED),
        (claim_of(1.0, claims.ANY), [0.97, 0.98, 0.97], NOT_REPRODUCED),
        (claim_of(1.0, claims.ANY), [1.0, 1.0, 1.0], NOT_REPRODUCED),
        (claim_of(0.0, 1.0), [0.9, 0.91, 0.9], REPRODUCED),
        (claim_of(0.8, 1.25), [0.9, 1.1, 1.0], UNDECIDED),
        (claim_of(0.8, 1.25), [0.99, 1.01, 1.0], REPRODUCED),
        (claim_of(0.8, 1.25), [1.3, 1.31, 1.3], NOT_REPRODUCED),
        (claim_of(0.37, 0.47, "", "hits"), [0.5, 0.51, 0.505], REPRODUCED),
        (claim_of(0.37, 0.47, "", "hits"), [0.9, 0.901, 0.9], NOT_REPRODUCED),
    ],
)
def test_verdicts(claim: Claim, values: list[float], expected: str) -> None:
    assert claims.verdict(claim, values) == expected


def test_a_case_is_simulated_and_told_with_its_claims(tmp_path: Path) -> None:
    rows = [{"question": "how many? " * 30, "answer": "so many " * number} for number in (9, 20)]
    (tmp_path / "gsm8k").mkdir()
    packed = zstandard.compress("\n".join(map(json.dumps, rows)).encode())
    (tmp_path / "gsm8k/train.jsonl.zst").write_bytes(packed)
    case = CASES[cases.PUSH]
    short = replace(
        case, setting=lambda data, seed: replace(case.setting(data, seed), duration_s=4.0)
    )
    figures = seeds_figures.run(short, tmp_path, [0, 1])
    assert len(figures) == len(case.systems) * len(seeds_figures.MEASURES)
    counts = report.verdict_figures(figures)
    judged = sum(counts[f"SkyWalker | {one}"].median for one in claims.VERDICTS)
    untestable = sum(isinstance(one, claims.UntestableClaim) for one in claims.CLAIMS["SkyWalker"])
    of_case = sum(getattr(one, "case", "") == cases.PUSH for one in ALL)
    assert judged == of_case + untestable
    record = result(
        "simulate_seeds",
        seed=0,
        options={"seeds": 2},
        started_at=datetime(2030, 1, 2, tzinfo=UTC),
        figures=figures | counts,
    )
    page = report.markdown(record)
    assert "pushing by pending over blind" in page
    assert claims.RULE in page
    assert f"### {cases.PUSH}" in page
    assert f"### {cases.CHAT}" not in page
    ours = figures[seeds_figures.figure_name(case.name, "SP-P", "weighted")]
    theirs = figures[seeds_figures.figure_name(case.name, "blind", "weighted")]
    claim = claims.CLAIMS["SkyWalker"][0]
    assert report.samples(claim, figures)[0] == ours.samples[0] / theirs.samples[0]


def test_a_row_has_source_load_both_figures_and_the_reason_unless_reproduced() -> None:
    name = seeds_figures.figure_name(cases.CHAT, "skywalker", "hits")
    claim = replace(claim_of(0.37, 0.47, "", "hits"), why="other data")
    low, high = ({name: figure([value, value + 0.01], "fraction")} for value in (0.4, 0.9))
    assert report.row(claim, low).endswith(f"| {REPRODUCED} |")
    cells = report.row(claim, high).split(" | ")
    assert cells[0] == "| 1"
    assert cells[2] == CASES[cases.CHAT].load
    assert cells[3] == "0.37 to 0.47"
    assert cells[5] == f"{NOT_REPRODUCED}: other data |"


def test_a_window_of_a_trace_leaves_long_prompts_out_and_starts_at_its_own_time(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"t": at_s, "input_length": tokens, "output_length": 900}
        for at_s, tokens in ((0, 100), (cases.WINDOW_S + 4, 200), (cases.WINDOW_S + 9, 30_000))
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    [(at_s, _)] = cases.window(path, 1, 2.0).arrivals["us"]
    assert at_s == 8.0


def test_frozen_weights_are_those_that_the_search_has_found(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    rows = [
        {
            "timestamp": 200 * number,
            "input_length": 600,
            "output_length": 20,
            "hash_ids": [number % 7, number],
        }
        for number in range(600)
    ]
    packed = zstandard.compress("\n".join(map(json.dumps, rows)).encode())
    (tmp_path / "traces/mooncake_conversation.jsonl.zst").write_bytes(packed)
    case = CASES[cases.HELD_OUT]
    frozen = case.systems["gorgo frozen"]
    assert callable(frozen)
    system = frozen(tmp_path)
    assert system == frozen(tmp_path)
    assert system.preset == "published"
    assert 0.05 <= system.options["w_rtt"] <= 2.0
    assert 0.05 <= system.options["w_queue"] <= 0.5
    assert (system.options["w_rtt"], system.options["w_queue"]) != (0.5, 0.1)


def test_the_committed_result_judges_every_claim_and_says_why_one_fails() -> None:
    found = read(RESULTS / "simulate-seeds.json")
    words = [report.judged(claim, found.figures) for claim in ALL]
    assert words.count(UNDECIDED) <= 3
    for claim, word in zip(ALL, words, strict=True):
        assert claim.why or word == REPRODUCED, claim
    counts = report.verdict_figures(found.figures)
    assert {name: found.figures[name].median for name in counts} == {
        name: one.median for name, one in counts.items()
    }
