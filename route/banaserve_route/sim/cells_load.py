"""Requests of regions whose days are shifted, drawn one by one as they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import cos, log, pi
from random import Random
from typing import NamedTuple

from banaserve.base.errors import UserError
from banaserve.sim.instances.prefix_cache import HASH_BLOCK_TOKENS
from banaserve_route.sim.replica import BLOCK_TOKENS, UNIT_BYTES

_PREFIX_BYTES = HASH_BLOCK_TOKENS // BLOCK_TOKENS * UNIT_BYTES
_SPREAD = 0.5
_MOST_PROMPT_TOKENS, _MOST_OUTPUT_TOKENS = 1000, 500


class RegionalRequest(NamedTuple):
    """Request of a region; ``prefix`` holds the digests of the prefix shared with others."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CellsLoad:
    """Load of one region. Lengths are lognormal, arrivals Poisson.

    Attributes:
        rate_per_s: Mean arrivals of the region per second.
        swing_fraction: Swing of the rate as a share of its mean; the rate follows a cosine with one
            period in the whole duration.
        prompt_tokens, output_tokens: Mean lengths in tokens; a prompt's without its shared prefix.
        num_prefixes: Number of shared prefixes, each one block of ``HASH_BLOCK_TOKENS``; the nth is
            used in proportion to 1/n.
        shared_fraction: Fraction of the requests that begin with one of these prefixes.
    """

    duration_s: float
    rate_per_s: float
    swing_fraction: float = 0.8
    prompt_tokens: float = 250.0
    output_tokens: float = 100.0
    num_prefixes: int = 1000
    shared_fraction: float = 0.3

    def __post_init__(self) -> None:
        for name in ("duration_s", "rate_per_s", "prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise UserError(f"{name} is {value:g}: give more than 0")
        for name in ("swing_fraction", "shared_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is {getattr(self, name):g}: give 0 to 1")
        if self.num_prefixes < 1:
            raise UserError(f"num_prefixes is {self.num_prefixes}: give 1 or more")

    def requests(self, seed: int, region: str, peak_s: float) -> Iterator[RegionalRequest]:
        """Yield the requests of ``region``, whose rate is highest at ``peak_s``."""
        draws = Random(f"{seed} cells {region}")
        highest = self.rate_per_s * (1 + self.swing_fraction)
        now_s = 0.0
        while (now_s := now_s + draws.expovariate(highest)) < self.duration_s:
            turn = 2 * pi * (now_s - peak_s) / self.duration_s
            rate = self.rate_per_s * (1 + self.swing_fraction * cos(turn))
            if draws.random() * highest >= rate:
                continue
            prompt_tokens = _length(draws, self.prompt_tokens, _MOST_PROMPT_TOKENS)
            output_tokens = _length(draws, self.output_tokens, _MOST_OUTPUT_TOKENS)
            prefix = b""
            if draws.random() < self.shared_fraction:
                # A rank whose probability falls as 1/n.
                rank = int(self.num_prefixes ** draws.random())
                prefix = rank.to_bytes(8, "little") * (_PREFIX_BYTES // 8)
                prompt_tokens += HASH_BLOCK_TOKENS
            yield RegionalRequest(now_s, prompt_tokens, output_tokens, prefix)


def _length(draws: Random, mean: float, most: int) -> int:
    value = draws.lognormvariate(log(mean) - _SPREAD**2 / 2, _SPREAD)
    return int(min(most, max(BLOCK_TOKENS, value)))
