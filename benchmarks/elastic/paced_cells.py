"""Cells on paced engines: a load, its rate, and the dilation of its seconds."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import NamedTuple

from benchmarks.elastic.cells import CODE, LoadCell, load_of
from benchmarks.elastic.runs import saturation_per_s
from benchmarks.pacing import PacedRequest

WARM_UP_S = 15.0
"""Warm-up of the arrivals, in modelled seconds; requests that arrive in it do not count."""

_OPT, _LLAMA = "opt-13b-a100", "llama-3.1-8b-h100"
_TOKEN_IDS = range(500, 40_000)


class PacedCell(NamedTuple):
    """A comparison on engines.

    Attributes:
        cell: Device, lengths, arrivals, limits and seed; its fraction of saturation counts if no
            rate is given.
        rate_per_s: Mean rate of arrivals; 0 for the cell's fraction of saturation.
        dilation: Wall seconds of a modelled second, enough for this machine to keep up.
    """

    name: str
    cell: LoadCell
    rate_per_s: float
    dilation: float

    @property
    def limits_s(self) -> tuple[float, float]:
        return self.cell.service_limits


CELLS = tuple(
    PacedCell(name, LoadCell(*cell), rate_per_s, dilation)
    for name, cell, rate_per_s, dilation in (
        ("longbench-8", (_OPT, "longbench reference", "steady", 0.0, 1, 1), 8.0, 2.0),
        ("longbench-16", (_OPT, "longbench reference", "steady", 0.0, 0, 1), 16.0, 2.0),
        ("alpaca-120", (_OPT, "alpaca reference", "steady", 0.0, 1, 1), 120.0, 8.0),
        ("longbench-alpaca-swing", (_OPT, "longbench reference", "swing", 0.7, 0, 2), 0.0, 2.0),
        ("chat-bursts", (_OPT, "chat 1500/400", "bursts", 0.7, 1, 3), 0.0, 2.0),
        ("chat-llama", (_LLAMA, "chat 1500/400", "steady", 0.85, 1, 4), 0.0, 8.0),
        ("longbench-512", (_OPT, "longbench capped", "diurnal", 0.85, 1, 5), 0.0, 2.0),
        ("summaries-llama-swing", (_LLAMA, "summaries 6000/200", "swing", 0.7, 1, 2), 0.0, 8.0),
        ("code-llama", (_LLAMA, CODE, "steady", 1.0, 1, 1), 0.0, 8.0),
        ("code-opt", (_OPT, CODE, "bursts", 0.85, 1, 1), 0.0, 2.0),
    )
)
"""Four cells with the lengths of Alpaca and LongBench, others with lengths of no data file, and
code completion at and below saturation."""


def requests_of(
    one: PacedCell, size: int, duration_s: float, data: Path | None
) -> list[PacedRequest]:
    """Return the requests that arrive in ``duration_s``; their prompts share nothing."""
    rate_per_s = one.rate_per_s or one.cell.fraction * saturation_per_s(one.cell, size, data)
    draws = Random(f"{one.name} prompts")
    return [
        PacedRequest(at_s, draws.choices(_TOKEN_IDS, k=prompt_tokens), output_tokens)
        for at_s, prompt_tokens, output_tokens in load_of(
            one.cell, rate_per_s, data, duration_s
        ).rows
    ]
