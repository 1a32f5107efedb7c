"""Runs of a cell: every fixed arrangement, and the elastic policy from all colocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.planner.candidates.arrangement import Arrangement, arrangements
from banaserve.sim.instances.batch import EngineLimits
from banaserve.sim.result import LatencyLimits, summary
from banaserve.sim.system import System, following
from banaserve_bench.simulation.run import tallied
from benchmarks.elastic.cells import LoadCell, Rows, load_of, sample

CHUNKS = (512, 2048)
"""Step sizes of the fixed arrangements, in tokens."""

_SAMPLE = 100
"""Requests per instance, all at once: enough to fill the batches."""


class Outcome(NamedTuple):
    """Outcome of one run.

    Attributes:
        goodput: Share of the requests within both limits.
        total_s: Seconds from the first arrival to the last token.
        changes_s: Times of changes of roles or step sizes.
    """

    goodput: float
    total_s: float
    tokens_per_s: float
    e2e_mean_s: float
    ttft_mean_s: float
    tpot_mean_s: float
    changes_s: tuple[float, ...] = ()


class CellOutcome(NamedTuple):
    """Outcomes of a cell: of fixed arrangements by description, of elastic variants by name."""

    cell: LoadCell
    num_requests: int
    fixed: dict[str, Outcome]
    elastic: dict[str, Outcome]

    @property
    def best(self) -> str:
        """Fixed arrangement with the highest goodput; among equals, with the lowest latency."""
        return max(self.fixed, key=lambda n: (self.fixed[n].goodput, -self.fixed[n].e2e_mean_s))


def fixed_system(arrangement: Arrangement) -> System:
    """Return a cluster whose arrangement stays as it is."""
    return System(
        kind="banaserve",
        prefill=arrangement.num_prefill,
        decode=arrangement.num_decode,
        colocated=arrangement.num_both,
        limits=EngineLimits(step_tokens=arrangement.step_tokens),
    )


class Variant(NamedTuple):
    """Differences of a variant of the elastic system from the whole system.

    Attributes:
        options: Options of the migration policy.
        system: Attributes of ``System``, such as the routing and its options.
    """

    options: Mapping[str, Any] = {}
    system: Mapping[str, Any] = {}


WHOLE = Variant()


def elastic_system(cell: LoadCell, size: int, variant: Variant = WHOLE) -> System:
    """Return a cluster that begins with all instances colocated and follows its load."""
    ttft_s, tpot_s = cell.service_limits
    system = System(kind="banaserve", colocated=size)
    options = {"profile": cell.profile, "ttft_s": ttft_s, "tpot_s": tpot_s, **variant.options}
    return replace(following(system, **options), **variant.system)


def saturation_per_s(cell: LoadCell, size: int, data: Path | None) -> float:
    """Return requests a second that the fastest of five arrangements ends if all come at once."""
    rows = sample(cell, size * _SAMPLE, data)
    half = size // 2
    some = [
        *(Arrangement(0, 0, size, chunk) for chunk in CHUNKS),
        *(Arrangement(p, size - p, 0, CHUNKS[-1]) for p in (half - 1, half, half + 1)),
    ]
    return max(len(rows.rows) / run_rows(cell, fixed_system(one), rows).total_s for one in some)


def run_cell(
    cell: LoadCell, size: int, data: Path | None, variants: Mapping[str, Variant]
) -> CellOutcome:
    """Run all systems that are compared in ``cell``, on the same requests."""
    rows = load_of(cell, cell.fraction * saturation_per_s(cell, size, data), data)
    fixed = {
        str(one): run_rows(cell, fixed_system(one), rows) for one in arrangements(size, CHUNKS)
    }
    elastic = {
        name: run_rows(cell, elastic_system(cell, size, variant), rows)
        for name, variant in variants.items()
    }
    return CellOutcome(cell, len(rows.rows), fixed, elastic)


def run_rows(cell: LoadCell, system: System, rows: Rows) -> Outcome:
    """Run ``rows`` through ``system``."""
    found = tallied(profiles.load(cell.profile), system, rows.requests())
    told = summary(found, LatencyLimits(*cell.service_limits))
    return Outcome(
        told["goodput_fraction"],
        told["total_s"],
        told["output_tokens_per_s"],
        told["e2e_mean_s"],
        told["ttft_mean_s"],
        told["tpot_mean_s"],
        tuple(sorted({at_s for at_s, _ in found.steps})),
    )
