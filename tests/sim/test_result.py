"""Figures of a run: percentiles by nearest rank."""

from __future__ import annotations

from math import ceil

import pytest

from banaserve.sim.result import percentile
from banaserve_route.sim.world import Record, RequestOutcome


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [
        (100, 0.5, 50),
        (100, 0.99, 99),
        (100, 0.07, 7),
        (100, 1.0, 100),
        (100, 0.0, 1),
        (101, 0.5, 51),
        (20, 0.95, 19),
        (10, 0.99, 10),
        (1, 0.5, 1),
    ],
)
def test_a_percentile_is_the_nearest_rank(count: int, share: float, expected: int) -> None:
    assert percentile(range(1, count + 1), share) == expected


@pytest.mark.parametrize("count", [1, 7, 40, 200])
def test_every_percent_has_its_rank(count: int) -> None:
    for percent in range(1, 101):
        rank = ceil(percent * count / 100) if percent * count % 100 else percent * count // 100
        assert percentile(range(1, count + 1), percent / 100) == rank


def test_no_values_give_nothing() -> None:
    assert percentile([], 0.5) == 0.0


def test_regions_count_ranks_alike_and_an_open_request_as_long_as_it_has_waited() -> None:
    records = [Record("us", 0.0, 1, 1, float(n), float(2 * n)) for n in range(1, 20)]
    outcome = RequestOutcome(50.0, [*records, Record("us", 10.0, 1, 1)], [1])
    assert outcome.ttft_s(0.5) == 10.0
    assert outcome.ttft_s(0.95) == 19.0
    assert outcome.ttft_s(1.0) == 40.0
    assert outcome.e2e_s(0.95) == 38.0
    assert outcome.num_censored == 1
