"""Arrivals independent of answers: load that follows the day, and traces."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi
from random import Random

from banaserve.base.errors import UserError
from banaserve.sim.trace import Arrival, cut
from banaserve_route.sim.programs import MakeProgram, Program, ProgramCall
from banaserve_route.sim.replica import BLOCK_TOKENS, UNIT_BYTES

Arrivals = Sequence[tuple[float, MakeProgram]]
"""Time of each arrival, in seconds, and its program; no arrival waits for another."""

HASH_TOKENS = 512
"""Tokens of the block that a hash id of Mooncake's traces stands for; 256 in ART-Chat's."""


def diurnal(
    program: MakeProgram,
    per_s: float,
    swing_fraction: float,
    period_s: float,
    peak_s: float,
    duration_s: float,
    seed: int,
) -> Arrivals:
    """Return Poisson arrivals whose rate follows a cosine.

    Args:
        program: Program of each arriving client.
        per_s: Mean rate, in arrivals per second.
        swing_fraction: Swing of the rate as a share of its mean: 0 for none, 1 for no arrivals at
            night.
        period_s: Length of a day, in seconds.
        peak_s: Time of the highest rate, in seconds; regions far apart differ in it.

    Raises:
        UserError: ``swing_fraction`` is not in [0, 1].
    """
    if not 0 <= swing_fraction <= 1:
        raise UserError(f"swing_fraction is {swing_fraction:g}: give 0 to 1")
    found: list[tuple[float, MakeProgram]] = []
    rng, now_s = Random(f"{seed}/{peak_s}"), 0.0
    highest = per_s * (1 + swing_fraction)
    while (now_s := now_s + rng.expovariate(highest)) < duration_s:
        rate = per_s * (1 + swing_fraction * cos(2 * pi * (now_s - peak_s) / period_s))
        if rng.random() * highest < rate:
            found.append((now_s, program))
    return found


def replay(
    rows: Sequence[Arrival],
    time_scale: float = 1.0,
    max_tokens: int | None = None,
    hash_tokens: int = HASH_TOKENS,
) -> Arrivals:
    """Return the requests of a trace in Mooncake's format; equal ids are equal prefixes.

    Args:
        time_scale: Factor of the time between arrivals: 2 is half the rate (GORGO's).
        max_tokens: Context size in tokens to which longer requests are cut; None for no limit.
        hash_tokens: Number of tokens of the block that a hash id stands for.
    """
    return [
        (row.at_s * time_scale, _once(_ask(number, row, max_tokens, hash_tokens)))
        for number, row in enumerate(rows)
    ]


def _ask(number: int, row: Arrival, max_tokens: int | None, hash_tokens: int) -> ProgramCall:
    prompt_tokens, output_tokens = cut(row.prompt_tokens, row.output_tokens, max_tokens)
    units = hash_tokens // BLOCK_TOKENS * UNIT_BYTES
    known = b"".join(Random(f"block {one}").randbytes(units) for one in row.hash_ids)
    size = max(1, prompt_tokens // BLOCK_TOKENS) * UNIT_BYTES
    own = Random(f"own {number}")
    # The part of the prompt without an id occurs in no other request.
    prompt = known[:size] + own.randbytes(max(0, size - len(known)))
    return ProgramCall(
        prompt, own.randbytes(max(1, output_tokens // BLOCK_TOKENS) * UNIT_BYTES), ""
    )


def _once(ask: ProgramCall) -> MakeProgram:
    def run(rng: Random, client: str) -> Program:
        yield [ask]

    return run
