"""Marks of a report's tables: which system is the best of a row, and which ones are not behind."""

from __future__ import annotations

from typing import Any

import pytest

from banaserve_bench.report.tables import Best, serving_table
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


def marks(systems: dict[str, list[Summary]], figure: str = "goodput, requests/s") -> list[str]:
    cells = rows_of(systems)[figure]
    return ["best" if isinstance(one, Best) else "like" if "≈" in one else "" for one in cells]


def test_one_that_leads_in_every_run() -> None:
    systems = {"a": runs("goodput_per_s", 100, 110, 120), "b": runs("goodput_per_s", 80, 90, 101)}
    assert marks(systems) == ["best", ""]


def test_less_is_better_where_it_is_time() -> None:
    systems = {"a": runs("ttft_p50", 0.2, 0.21), "b": runs("ttft_p50", 0.1, 0.105)}
    assert marks(systems, "TTFT p50, ms") == ["", "best"]


@pytest.mark.parametrize(
    ("theirs", "is_told_apart"),
    [
        # Differences of one sign, as large as each other.
        ((99, 109, 119), False),
        ((95, 104, 113), True),
        # The mean is as far away, and one run says the opposite.
        ((80, 121, 111), False),
        ((100, 110, 119), False),
    ],
)
def test_told_apart_is_what_all_runs_bear_out(
    theirs: tuple[float, ...], is_told_apart: bool
) -> None:
    systems = {"a": runs("goodput_per_s", 100, 110, 120), "b": runs("goodput_per_s", *theirs)}
    assert marks(systems) == ["best", "" if is_told_apart else "like"]


def test_a_tie_has_no_marks() -> None:
    assert marks({"a": runs("goodput_per_s", 5, 5), "b": runs("goodput_per_s", 5, 5)}) == ["", ""]


def test_two_may_lead_together() -> None:
    systems = {
        "a": runs("goodput_per_s", 100, 110, 120),
        "b": runs("goodput_per_s", 101, 107, 121),
        "c": runs("goodput_per_s", 50, 55, 60),
    }
    assert marks(systems) == ["best", "like", ""]


@pytest.mark.parametrize(("theirs", "mark"), [(96, "like"), (94, "")])
def test_a_single_run_has_no_spread(theirs: float, mark: str) -> None:
    systems = {"a": [cell(goodput_per_s=100)], "b": [cell(goodput_per_s=theirs)]}
    assert marks(systems) == ["best", mark]


def test_runs_of_other_requests_tell_nothing_apart() -> None:
    systems = {"a": [cell(seed=0, goodput_per_s=9)], "b": [cell(seed=1, goodput_per_s=3)]}
    assert marks(systems) == ["best", "like"]


def test_one_that_lost_everything() -> None:
    systems = {
        "a": runs("goodput_per_s", 5, 6, ttft_p50=0.1),
        "b": runs("failed_fraction", 1, 1, failed=10),
    }
    rows = rows_of(systems)
    assert rows["failed"] == ["0", "20"]
    assert rows["goodput, requests/s"][1] == "-"


def test_latencies_of_one_that_lost_more_do_not_win() -> None:
    systems = {
        "a": runs("ttft_p50", 0.3, 0.3, goodput_per_s=5),
        "b": runs("ttft_p50", 0.1, 0.1, goodput_per_s=4, failed=5),
        "c": runs("ttft_p50", 0.4, 0.4, goodput_per_s=5),
    }
    assert rows_of(systems)["TTFT p50, ms"][1] == "[100 ± 0]"
    assert marks(systems, "TTFT p50, ms") == ["best", "", ""]


def test_what_is_missing_has_a_dash() -> None:
    systems = {
        "a": [*runs("tpot_p50", 0.02, 0.02), *runs("goodput_per_s", 5, 5, load=4)],
        "b": runs("goodput_per_s", 2, 2),
    }
    assert rows_of(systems)["TPOT p50, ms"] == ["20 ± 0", "-"]


def test_nothing_is_behind_something() -> None:
    assert marks({"a": runs("goodput_per_s", 3, 3), "b": runs("goodput_per_s", 0, 0)}) == [
        "best",
        "",
    ]
    assert marks({"a": runs("goodput_per_s", 0, 0), "b": runs("goodput_per_s", 0, 0)}) == ["", ""]
