"""The corrected equations, and the pipeline that they summarise."""

from __future__ import annotations

import itertools
import random

import pytest

import paper_equations
from benchmarks.drivers.layer_pipeline import Prefill, hidden_fraction, pipeline
from depth import chosen_seed

# BanaServe's example: Llama-3.1-8B, 1,000 tokens in 270 ms, 4 KiB a token and layer.
PAPER = Prefill(0.270, 32, 1000, 0.5, 4096)


def test_the_papers_example() -> None:
    assert PAPER.compute_layer_s() == pytest.approx(4.22e-3, rel=1e-3)
    assert PAPER.fetch_layer_s(25e9) == pytest.approx(0.082e-3, rel=1e-2)
    assert PAPER.hides(25e9)


@pytest.mark.parametrize(
    ("prefill", "bytes_per_s", "expected"),
    [
        (PAPER, 25e9, 0.981),
        (Prefill(0.127, 40, 1000, 0.5, 20480), 25e9, 0.795),
        (Prefill(0.127, 40, 1000, 0.5, 20480), 12.5e9, 0.66),
    ],
)
def test_the_fraction_up_to_which_a_fetch_hides(
    prefill: Prefill, bytes_per_s: float, expected: float
) -> None:
    assert paper_equations.break_even_fraction(prefill, bytes_per_s) == pytest.approx(
        expected, abs=5e-3
    )


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_break_even_is_where_the_two_equations_meet(fraction: float) -> None:
    prefill = Prefill(1.5, 30, 768, fraction, 1536)
    bandwidth = prefill.break_even_bytes_per_s()
    assert prefill.fetch_layer_s(bandwidth) == pytest.approx(prefill.compute_layer_s())
    assert prefill.hides(bandwidth * 1.01)
    assert not prefill.hides(bandwidth * 0.99)
    assert paper_equations.break_even_fraction(prefill, bandwidth) == pytest.approx(fraction)


def test_what_is_stored_is_what_was_not_fetched() -> None:
    prefill = Prefill(1.0, 10, 100, 0.25, 1000)
    moved = prefill.fetch_layer_s(1e6) + prefill.store_layer_s(1e6)
    assert moved == pytest.approx(100 * 1000 / 1e6)


def test_no_bandwidth_hides_a_fetch_of_everything() -> None:
    with pytest.raises(ValueError, match="nothing is computed"):
        Prefill(1.0, 10, 100, 1.0, 1000).break_even_bytes_per_s()


@pytest.mark.parametrize(
    "change",
    [{"cached_fraction": 1.1}, {"num_layers": 0}, {"full_compute_s": -1.0}, {"num_tokens": 0}],
)
def test_values_that_mean_nothing_are_refused(change: dict[str, float]) -> None:
    good = {
        "full_compute_s": 1.0,
        "num_layers": 1,
        "num_tokens": 1,
        "cached_fraction": 0.5,
        "token_layer_bytes": 1,
    }
    with pytest.raises(ValueError):  # noqa: PT011 - each message names its own value
        Prefill(**{**good, **change})


@pytest.mark.parametrize(
    ("fetch", "compute", "store", "end_s", "fetch_wait_s", "store_wait_s"),
    [
        (1.0, 3.0, 1.0, 1 + 3 * 10 + 1, 1.0, 1.0),  # hidden but for the first and the last
        (3.0, 1.0, 1.0, 3 * 10 + 1 + 1, 3 * 10 - 9, 1.0),  # bound by fetching
        (1.0, 1.0, 3.0, 1 + 1 + 3 * 10, 1.0, 3 * 10 - 9),  # bound by storing
        (0.0, 1.0, 0.0, 10.0, 0.0, 0.0),
    ],
)
def test_equal_layers(
    fetch: float,
    compute: float,
    store: float,
    end_s: float,
    fetch_wait_s: float,
    store_wait_s: float,
) -> None:
    line = pipeline([fetch] * 10, [compute] * 10, [store] * 10)
    assert (line.end_s, line.fetch_wait_s, line.store_wait_s) == pytest.approx(
        (end_s, fetch_wait_s, store_wait_s)
    )


def test_any_layers_keep_to_the_bounds() -> None:
    draw = random.Random(chosen_seed(3))
    for _ in range(200):
        layers = draw.randint(1, 12)
        stages = [[draw.uniform(0, 2) for _ in range(layers)] for _ in range(3)]
        line = pipeline(*stages)
        totals = [sum(stage) for stage in stages]
        assert max(totals) - 1e-9 <= line.end_s <= sum(totals) + 1e-9
        # Every path through the grid of layers and stages is a lower bound, and one is reached.
        paths = [
            sum(stages[0][: a + 1]) + sum(stages[1][a : b + 1]) + sum(stages[2][b:])
            for a, b in itertools.combinations_with_replacement(range(layers), 2)
        ]
        assert line.end_s == pytest.approx(max(paths))
        computed_s = line.end_s - line.store_wait_s
        assert computed_s == pytest.approx(totals[1] + line.fetch_wait_s)


@pytest.mark.parametrize(
    ("transfer_s", "visible_s", "expected"),
    [(2.0, 0.5, 0.75), (2.0, 0.0, 1.0), (2.0, 3.0, 0.0), (0.0, 0.0, 1.0)],
)
def test_hidden_fraction(transfer_s: float, visible_s: float, expected: float) -> None:
    assert hidden_fraction(transfer_s, visible_s) == expected
