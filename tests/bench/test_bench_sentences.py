"""Sentences of a report, against the figures that they are made of."""

from __future__ import annotations

from typing import Any

import pytest

from banaserve_bench.report.sentences import (
    comparison,
    equal_answers,
    of_figures,
    of_one,
)
from banaserve_bench.report.tables import Best, serving_table
from banaserve_bench.results import result
from banaserve_bench.serving.summary import Summary


def cell(load: float = 2, seed: int = 0, failed: int = 0, **metrics: float) -> Summary:
    return Summary(
        load=load,
        is_closed=False,
        seed=seed,
        requests=10,
        completed=10 - failed,
        failed=failed,
        timed_out=0,
        interrupted=0,
        warm_up_requests=0,
        cut_prompts=0,
        errors={},
        metrics=metrics,
        samples={},
    )


def runs(metric: str, *values: float, load: float = 2, **others: Any) -> list[Summary]:
    return [cell(load, seed, **{metric: value}, **others) for seed, value in enumerate(values)]


def rows_of(systems: dict[str, list[Summary]]) -> dict[str, list[str]]:
    head, *rows = serving_table(systems)
    assert head == ["load", "figure", *systems]
    return {figure: cells for _, figure, *cells in rows}


def marks(cells: list[str]) -> list[str]:
    return ["best" if isinstance(one, Best) else "like" if "≈" in one else "" for one in cells]


def test_one_that_leads_in_every_run() -> None:
    systems = {
        "a": runs("output_tokens_per_s", 100, 110, 120),
        "b": runs("output_tokens_per_s", 80, 90, 101),
    }
    score, of_a, of_b, lost, rule = comparison(systems)
    assert score == (
        "Best, or not told apart from the best, of 1 comparison (1 figure at 1 load): "
        "a in 1 (alone in 1), b in 0 (alone in 0)."
    )
    assert of_a == "a is behind in none of 1 comparison."
    assert of_b == (
        "b is behind in 1 of 1 comparison, furthest by output tokens at 2 requests/s: "
        "90.3 tokens/s against 110.0 tokens/s of a (0.82 times that)."
    )
    assert lost == "No request was lost."
    assert "3 runs" in rule
    assert marks(rows_of(systems)["output, tokens/s"]) == ["best", ""]


def test_less_is_better_where_it_is_time() -> None:
    systems = {"a": runs("ttft_p50", 0.2, 0.21), "b": runs("ttft_p50", 0.1, 0.105)}
    assert "a is behind in 1 of 1" in comparison(systems)[1]
    assert "(2.00 times that)" in comparison(systems)[1]
    assert marks(rows_of(systems)["TTFT p50, ms"]) == ["", "best"]


@pytest.mark.parametrize(
    ("theirs", "is_told_apart"),
    [
        # Differences of one sign, as large as each other.
        ((99, 109, 119), False),
        ((95, 104, 113), True),
        # The mean is as far away, and one run says the opposite.
        ((80, 121, 111), False),
        ((100, 110, 120), False),
    ],
)
def test_told_apart_is_what_all_runs_bear_out(
    theirs: tuple[float, ...], is_told_apart: bool
) -> None:
    systems = {
        "a": runs("goodput_per_s", 100, 110, 120),
        "b": runs("goodput_per_s", *theirs),
    }
    assert comparison(systems)[0].endswith(
        "a in 1 (alone in 1), b in 0 (alone in 0)."
        if is_told_apart
        else "a in 1 (alone in 0), b in 1 (alone in 0)."
    )


def test_a_tie_has_no_marks() -> None:
    systems = {"a": runs("goodput_per_s", 5, 5), "b": runs("goodput_per_s", 5, 5)}
    assert comparison(systems)[0].endswith("a in 1 (alone in 0), b in 1 (alone in 0).")
    assert marks(rows_of(systems)["goodput, requests/s"]) == ["", ""]


def test_two_may_lead_together() -> None:
    systems = {
        "a": runs("goodput_per_s", 100, 110, 120),
        "b": runs("goodput_per_s", 101, 107, 121),
        "c": runs("goodput_per_s", 50, 55, 60),
    }
    assert comparison(systems)[0].endswith(
        "a in 1 (alone in 0), b in 1 (alone in 0), c in 0 (alone in 0)."
    )
    assert marks(rows_of(systems)["goodput, requests/s"]) == ["best", "like", ""]


def test_a_single_run_has_no_spread() -> None:
    near = {"a": [cell(goodput_per_s=100)], "b": [cell(goodput_per_s=96)]}
    far = {"a": [cell(goodput_per_s=100)], "b": [cell(goodput_per_s=94)]}
    assert "b in 1 (alone in 0)" in comparison(near)[0]
    assert "b in 0 (alone in 0)" in comparison(far)[0]
    assert comparison(near)[-1].startswith("Each system ran once, and one run has no spread")
    assert rows_of(far)["goodput, requests/s"] == ["100", "94"]


def test_runs_of_other_requests_tell_nothing_apart() -> None:
    systems = {"a": [cell(seed=0, goodput_per_s=9)], "b": [cell(seed=1, goodput_per_s=3)]}
    assert "b in 1 (alone in 0)" in comparison(systems)[0]


def test_one_that_lost_everything() -> None:
    systems = {
        "a": runs("goodput_per_s", 5, 6, ttft_p50=0.1),
        "b": runs("failed_fraction", 1, 1, failed=10),
    }
    told = comparison(systems)
    assert told[0] == "No figure is there of two systems, so that none can lead."
    assert told[1] == "At 2 requests/s b lost all of its 20 requests."
    rows = rows_of(systems)
    assert rows["failed"] == ["0", "20"]
    assert rows["goodput, requests/s"][1] == "-"


def test_latencies_of_one_that_lost_more_do_not_win() -> None:
    systems = {
        "a": runs("ttft_p50", 0.3, 0.3, goodput_per_s=5),
        "b": runs("ttft_p50", 0.1, 0.1, goodput_per_s=4, failed=5),
        "c": runs("ttft_p50", 0.4, 0.4, goodput_per_s=5),
    }
    told = comparison(systems)
    assert "c is behind in 1 of 2 comparisons, furthest by time to first token (p50)" in told[3]
    assert "At 2 requests/s b lost 10 of 20 requests." in told
    assert "Latencies of systems that lost more requests than others are not compared." in told
    assert rows_of(systems)["TTFT p50, ms"][1] == "[100 ± 0]"
    assert marks(rows_of(systems)["TTFT p50, ms"]) == ["best", "", ""]


def test_what_is_missing_is_named() -> None:
    systems = {
        "a": [*runs("tpot_p50", 0.02, 0.02), *runs("goodput_per_s", 5, 5, load=4)],
        "b": runs("goodput_per_s", 2, 2),
    }
    told = comparison(systems)
    assert told[0].startswith("No figure is there of two systems")
    assert "At 4 requests/s there is nothing of b." in told
    assert rows_of(systems)["TPOT p50, ms"] == ["20 ± 0", "-"]


def test_nothing_over_nothing_is_no_ratio() -> None:
    systems = {"a": runs("goodput_per_s", 3, 3), "b": runs("goodput_per_s", 0, 0)}
    assert comparison(systems)[2].endswith("0 requests/s against 3 requests/s of a (0 times that).")
    none = {"a": runs("goodput_per_s", 0, 0), "b": runs("goodput_per_s", 0, 0)}
    assert "a in 1 (alone in 0), b in 1 (alone in 0)." in comparison(none)[0]


def test_loads_are_counted() -> None:
    systems = {
        name: [one for load in (8, 4) for one in runs("goodput_per_s", *values, load=load)]
        for name, values in {"a": (5, 5), "b": (2, 2)}.items()
    }
    assert "2 comparisons (1 figure at 2 loads)" in comparison(systems)[0]


def test_one_system_tells_its_highest_load() -> None:
    cells = [cell(2, failed=1, ttft_p50=0.1), cell(4, failed=2, ttft_p50=0.25)]
    assert of_one(cells) == (
        "At 4 requests/s: time to first token (p50) 250 ms; 2 of 10 requests lost."
    )


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ({}, []),
        ({"a": 1.0}, ["All checked answers were those of one vLLM engine."]),
        (
            {"a": 1.0, "b": 0.75},
            ["Checked answers that were not those of one vLLM engine: b 25%."],
        ),
    ],
)
def test_answers_that_differ(shares: dict[str, float], told: list[str]) -> None:
    figures = {f"{name}.equal_answers": result.figure([one], "") for name, one in shares.items()}
    assert equal_answers(figures) == told


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        ({}, "There is no figure."),
        ({"a": [1.0]}, "1 figure of one run, which has no spread."),
        (
            {"a": [1.0, 1.1, 0.9], "b": [1.0, 2.0, 3.0]},
            "2 figures, medians of 3 runs; largest less smallest run is 100% of the median for "
            "half of them and 100% at most (b).",
        ),
        ({"a": [0.0, 0.0]}, "1 figure, medians of 2 runs."),
        (
            {"a": [-1.0, -3.0]},
            "1 figure, medians of 2 runs; largest less smallest run is 100% "
            "of the median for half of them and 100% at most (a).",
        ),
    ],
)
def test_other_results_tell_their_runs(figures: dict[str, list[float]], told: str) -> None:
    assert of_figures({name: result.figure(one, "s") for name, one in figures.items()}) == [told]
