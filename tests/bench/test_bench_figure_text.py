"""Figures as text: the digits that they bear, and no exponents."""

from __future__ import annotations

import pytest

from banaserve_bench.results.figure_text import interval_text, number, row, scaled, with_half


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (2.0, "2"),
        (100496, "100,496"),
        (12860.3, "12,860"),
        (157359.2, "157,400"),
        (0.078223, "0.07822"),
        (13.4, "13.4"),
        (0.99996, "1"),
        (-12.345, "-12.35"),
        (0.00004, "0.00004"),
        (5.83e-07, "5.8e-07"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (707.5, 178.0, "710 ± 180"),
        (1993.0, 391.0, "1,990 ± 390"),
        (20.95, 0.1, "20.95 ± 0.10"),
        (13.4, 1.4, "13.4 ± 1.4"),
        # The half's own rounding moves its first digit.
        (9.9666, 0.0996, "9.97 ± 0.10"),
        (95.3, 152.0, "100 ± 150"),
        (-0.15, 1.9, "-0.1 ± 1.9"),
        (0.0, 0.5, "0.00 ± 0.50"),
        # Minus nothing is nothing.
        (-0.001, 0.9, "0.00 ± 0.90"),
        (48.0, 0.0, "48 ± 0"),
        (3921.123456, 0.00001, "3,921.12 ± less than 0.01"),
        (5e-7, 2.4e-8, "5e-07 ± 2.4e-08"),
    ],
)
def test_a_mean_ends_where_its_half_width_does(mean: float, half: float, text: str) -> None:
    assert with_half(mean, half) == text


def test_of_one_run_there_is_no_half_width() -> None:
    assert interval_text([254.31]) == "254.3"
    assert interval_text([0.0123], 1e3) == "12.3"
    assert interval_text([1.0, 3.0]) == "2 ± 13"


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([56.35, 289.4], ["56.4", "289.4"]),
        ([5.294, 5.697], ["5.29", "5.70"]),
        ([12860.0, 6710.4], ["12,860", "6,710"]),
        # Four digits of the largest are enough.
        ([0.0123, 512.34], ["0.0", "512.3"]),
        ([1, 20], ["1", "20"]),
        ([0.0, 0.5], ["0.000", "0.500"]),
        ([], []),
    ],
)
def test_a_row_ends_at_one_place(values: list[float], texts: list[str]) -> None:
    assert row(values) == texts


@pytest.mark.parametrize(
    ("values", "unit", "factor", "name"),
    [
        ([0.0005, 0.0021], "s", 1e3, "ms"),
        ([2e-6], "s", 1e6, "us"),
        ([3e-9], "s", 1e6, "us"),
        ([75.6], "s", 1, "s"),
        ([0.0], "s", 1, "s"),
        ([5451757568], "bytes", 2**-30, "GiB"),
        ([12], "B", 1, "bytes"),
        ([0.5], "fraction", 1, "fraction"),
    ],
)
def test_units_fit_the_largest(values: list[float], unit: str, factor: float, name: str) -> None:
    found, told = scaled(values, unit)
    assert (found, told) == (pytest.approx(factor), name)
