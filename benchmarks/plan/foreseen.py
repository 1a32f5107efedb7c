"""System whose figures were predicted before engines served the same requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from banaserve_bench.loadgen.modelled_time import MOST_LATE
from banaserve_bench.plan.confirm.engines import EngineOutcome

GOODPUT, TTFT, TPOT, THROUGHPUT = FIGURES = (
    "goodput_fraction",
    "ttft_mean_s",
    "tpot_mean_s",
    "output_tokens_per_s",
)
"""Figures that are kept, by the simulator's names."""


class ForeseenSystem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prediction and outcome of one system, for the same requests.

    Attributes:
        name: Name of the system, as the advisor has it.
        predicted: Figures of the simulator.
        outcome: Figures of the engines; None if they have not run.
        overrun_fraction: Share of their steps that took longer than modelled.
    """

    name: str
    predicted: dict[str, float]
    outcome: dict[str, float] | None = None
    overrun_fraction: float = 0.0

    @property
    def is_void(self) -> bool:
        """True if too many steps were late for the outcome to mean anything."""
        return self.overrun_fraction > MOST_LATE

    @property
    def is_due(self) -> bool:
        """True if engines have not served the requests yet, or not in time."""
        return self.outcome is None or self.is_void

    def served(self, found: EngineOutcome) -> ForeseenSystem:
        """Return this system with the outcome of its engines."""
        return msgspec.structs.replace(
            self, outcome=kept(found.figures), overrun_fraction=found.overrun_fraction
        )

    def error(self, figure: str) -> float:
        """Return the relative error of a predicted figure, with its sign; 0 if nothing was real."""
        assert self.outcome is not None
        real = self.outcome[figure]
        return self.predicted[figure] / real - 1 if real else 0.0

    @property
    def words(self) -> str:
        told = self.outcome or {}
        pairs = (f"{key} {value:.4g} ({told[key]:.4g})" for key, value in self.predicted.items())
        late = f"{self.overrun_fraction:.1%} of the steps late"
        return f"predicted (real): {', '.join(pairs)}; {late}"


def kept(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that are kept."""
    return {name: float(figures[name]) for name in FIGURES}
