"""Cells of the comparison: a device and model, lengths, arrivals, a rate and a pair of limits.

The compared cells are a covering subset of the product of all: they are drawn without replacement,
by a fixed seed, so that every level of every factor occurs as often as any other, within one; no
cell is picked by hand, and none for its outcome.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.sim.request import SimRequest
from banaserve.sim.trace import cut, read_trace
from banaserve_bench.datasets.files import dataset_files
from banaserve_bench.simulation.lengths import draw_measured
from banaserve_bench.simulation.workload import Arrivals

DURATION_S = 120.0
"""Duration of the arrivals of a cell, in seconds."""

_MAX_OUTPUT_TOKENS = 512
_PHASE_S = 30.0
_TRACED = ("azure", "mooncake", "servegen")

LIMITS = {
    "opt-13b-a100": ((2.0, 0.1), (1.0, 0.06), (0.5, 0.05)),
    "llama-3.1-8b-h100": ((2.0, 0.03), (1.0, 0.02), (0.5, 0.015)),
}
"""Time to first token and time per output token, in seconds: lax, usual and tight."""

FRACTIONS = (0.5, 0.7, 0.85, 1.0, 1.2)
"""Rates as fractions of saturation; see ``runs.saturation_per_s``."""

ARRIVALS = ("steady", "bursts", "diurnal", "swing")
"""Kinds of arrivals; swing: every 30 s the lengths change to those of the other load of a pair."""


def _capped(dataset: str) -> Callable[[Random], tuple[int, int]]:
    return lambda draws: (round(draw_measured(f"{dataset}_prompt", draws)), _MAX_OUTPUT_TOKENS)


def _reference(dataset: str) -> Callable[[Random], tuple[int, int]]:
    return lambda draws: (
        round(draw_measured(f"{dataset}_prompt", draws)),
        min(_MAX_OUTPUT_TOKENS, round(draw_measured(f"{dataset}_output", draws))),
    )


def _around(prompt: float, output: float) -> Callable[[Random], tuple[int, int]]:
    """Return a function that draws lognormal lengths with these means; no data file has them."""

    def draw(draws: Random) -> tuple[int, int]:
        lengths = [draws.lognormvariate(math.log(mean) - 0.125, 0.5) for mean in (prompt, output)]
        return max(1, round(lengths[0])), max(1, round(lengths[1]))

    return draw


LENGTHS: dict[str, Callable[[Random], tuple[int, int]]] = {
    "alpaca capped": _capped("alpaca"),
    "alpaca reference": _reference("alpaca"),
    "longbench capped": _capped("longbench"),
    "longbench reference": _reference("longbench"),
    "chat 1500/400": _around(1500, 400),
    "documents 12000/100": _around(12_000, 100),
    "reasoning 600/600": _around(600, 600),
    "summaries 6000/200": _around(6000, 200),
}

CODE = "code 2000/30"
"""Code completion, drawn with the means of such traces; in no covering subset."""

_ALL_LENGTHS = {**LENGTHS, CODE: _around(2000, 30)}

_OPPOSITE = {
    "alpaca capped": "longbench reference",
    "alpaca reference": "longbench capped",
    "longbench capped": "alpaca reference",
    "longbench reference": "alpaca capped",
    "chat 1500/400": "documents 12000/100",
    "documents 12000/100": "reasoning 600/600",
    "reasoning 600/600": "summaries 6000/200",
    "summaries 6000/200": "reasoning 600/600",
}


class LoadCell(NamedTuple):
    """A comparison at one load."""

    profile: str
    lengths: str
    arrivals: str
    fraction: float
    limits: int
    seed: int

    @property
    def name(self) -> str:
        ttft_s, tpot_s = self.service_limits
        return (
            f"{self.profile}, {self.lengths}, {self.arrivals}, {self.fraction:g} of saturation, "
            f"{ttft_s:g} s and {1e3 * tpot_s:g} ms, seed {self.seed}"
        )

    @property
    def service_limits(self) -> tuple[float, float]:
        return LIMITS[self.profile][self.limits]

    @property
    def is_varying(self) -> bool:
        return self.arrivals in ("diurnal", "swing")


def cells(how_many: int, traced: bool) -> list[LoadCell]:
    """Return a covering subset of ``how_many`` cells, see the module."""
    levels: list[Sequence[object]] = [
        tuple(LIMITS),
        (*LENGTHS, *(_TRACED if traced else ())),
        ARRIVALS,
        FRACTIONS,
        range(3),
        range(1, 6),
    ]
    rows = covering(levels, how_many, "cells of the elastic comparison")
    found = [LoadCell(*one) for one in rows]
    # A trace has its own arrivals, which are stretched to the rate.
    return [one._replace(arrivals="steady") if one.lengths in _TRACED else one for one in found]


def covering(
    levels: Sequence[Sequence[object]], how_many: int, seed: str
) -> Iterator[tuple[Any, ...]]:
    """Yield rows with a level of each factor, which occurs as often as any other, within one."""
    draws = Random(seed)
    columns = []
    for options in levels:
        column = [options[n % len(options)] for n in range(how_many)]
        draws.shuffle(column)
        columns.append(column)
    yield from zip(*columns, strict=True)


class Rows(NamedTuple):
    """Arrival, prompt and output tokens of each request, for several runs of the same requests."""

    rows: list[tuple[float, int, int]]

    def requests(self) -> list[SimRequest]:
        return [SimRequest(number, *row) for number, row in enumerate(self.rows)]


def sample(cell: LoadCell, count: int, data: Path | None) -> Rows:
    """Return ``count`` requests of the cell's lengths that all arrive at once."""
    draws = Random(f"{cell.lengths} sample")
    most = profiles.load(cell.profile).model.max_context_tokens
    if cell.lengths in _TRACED:
        found = _trace(cell.lengths, data)
        picked = [found[n % len(found)] for n in range(count)]
        return Rows([(0.0, *cut(prompt, output, most)) for _, prompt, output in picked])
    names = [cell.lengths]
    if cell.arrivals == "swing":
        names.append(_OPPOSITE[cell.lengths])
    return Rows(
        [(0.0, *cut(*_ALL_LENGTHS[names[n % len(names)]](draws), most)) for n in range(count)]
    )


def load_of(
    cell: LoadCell, rate_per_s: float, data: Path | None, duration_s: float = DURATION_S
) -> Rows:
    """Return the cell's requests at a mean of ``rate_per_s``."""
    draws = Random(f"{cell.lengths} {cell.arrivals} {cell.seed}")
    most = profiles.load(cell.profile).model.max_context_tokens
    if cell.lengths in _TRACED:
        return _stretched(cell, rate_per_s, most, data)
    arrivals = Arrivals(
        duration_s=duration_s,
        rate_per_s=rate_per_s,
        variation=3.0 if cell.arrivals == "bursts" else 1.0,
        swing_fraction=0.8 if cell.arrivals == "diurnal" else 0.0,
        period_s=duration_s / 2,
    )
    rows = []
    for at_s in arrivals.times_s(draws):
        is_other = cell.arrivals == "swing" and int(at_s / _PHASE_S) % 2
        name = _OPPOSITE[cell.lengths] if is_other else cell.lengths
        rows.append((at_s, *cut(*_ALL_LENGTHS[name](draws), most)))
    return Rows(rows)


def _stretched(cell: LoadCell, rate_per_s: float, most: int, data: Path | None) -> Rows:
    """Return a section of the trace, a different one for each seed, stretched to the rate."""
    found = _trace(cell.lengths, data)
    count = min(len(found), max(2, round(rate_per_s * DURATION_S)))
    first = (len(found) - count) * (cell.seed - 1) // 4
    part = found[first : first + count]
    lasts_s = part[-1][0] - part[0][0]
    if not lasts_s > 0:
        raise UserError(f"the {cell.lengths} trace has no time between its arrivals")
    factor = count / rate_per_s / lasts_s
    return Rows([((at_s - part[0][0]) * factor, *cut(p, o, most)) for at_s, p, o in part])


def _trace(name: str, data: Path | None) -> list[tuple[float, int, int]]:
    (path, *_) = dataset_files(name, data)
    return [(row.at_s, row.prompt_tokens, row.output_tokens) for row in read_trace(path)]
