"""Cells of constant load: how often anything changes once the load is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.table import Table

from banaserve_bench.results.result import Figure, figure
from benchmarks.elastic.cells import LIMITS, LoadCell, load_of
from benchmarks.elastic.runs import WHOLE, Variant, elastic_system, run_rows, saturation_per_s

KNOWN_S = 120.0
"""Seconds after which a constant load is known; changes after that are oscillations."""

CONSTANT_FRACTIONS = (0.5, 0.9, 1.1)

_LENGTHS = {
    "opt-13b-a100": ("alpaca capped", "longbench reference"),
    "llama-3.1-8b-h100": ("chat 1500/400", "documents 12000/100"),
}


class ConstantOutcome(NamedTuple):
    """Outcome of one cell.

    Attributes:
        changes_s: Times of changes of roles, step sizes and modules, while requests arrived.
    """

    cell: LoadCell
    num_requests: int
    minutes: float
    goodput: float
    changes_s: tuple[float, ...]

    @property
    def changes_a_minute(self) -> float:
        """Changes a minute once the load was known."""
        late = [at_s for at_s in self.changes_s if at_s > KNOWN_S]
        return len(late) / (self.minutes - KNOWN_S / 60)


def constant_cells(fractions: Sequence[float] = CONSTANT_FRACTIONS) -> list[LoadCell]:
    """Return cells of two kinds of lengths of each profile at each of ``fractions``."""
    return [
        LoadCell(profile, lengths, "steady", fraction, 1, 1)
        for profile in LIMITS
        for lengths in _LENGTHS[profile]
        for fraction in fractions
    ]


def run_constant(
    cell: LoadCell, size: int, minutes: float, variant: Variant = WHOLE
) -> ConstantOutcome:
    """Run ``cell`` for ``minutes`` simulated minutes of arrivals."""
    rate_per_s = cell.fraction * saturation_per_s(cell, size, None)
    rows = load_of(cell, rate_per_s, None, 60 * minutes)
    outcome = run_rows(cell, elastic_system(cell, size, variant), rows)
    until_s = rows.rows[-1][0]
    changes_s = tuple(at_s for at_s in outcome.changes_s if at_s <= until_s)
    return ConstantOutcome(cell, len(rows.rows), minutes, outcome.goodput, changes_s)


def constant_figures(outcomes: Sequence[ConstantOutcome]) -> dict[str, Figure]:
    """Return changes a minute after the first two minutes, of all cells and their maximum."""
    rates = [one.changes_a_minute for one in outcomes]
    return {
        "changes_a_minute": figure(rates, "changes"),
        "changes_a_minute_max": figure([max(rates)], "changes"),
        "early_changes": figure(
            [sum(at_s <= KNOWN_S for at_s in one.changes_s) for one in outcomes], "changes"
        ),
    }


def constant_table(outcomes: Iterable[ConstantOutcome]) -> Table:
    """Return a table with a row for each cell."""
    shown = Table(title="changes under constant load")
    for heading in ("cell", "requests", "goodput", "changes at, s", "a minute, after two"):
        shown.add_column(heading)
    for one in outcomes:
        shown.add_row(
            one.cell.name,
            str(one.num_requests),
            f"{one.goodput:.3f}",
            " ".join(f"{at_s:.0f}" for at_s in one.changes_s) or "none",
            f"{one.changes_a_minute:.2f}",
        )
    return shown
