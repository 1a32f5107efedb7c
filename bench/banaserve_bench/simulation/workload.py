"""Requests for a simulation, drawn from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.sim.request import SimRequest
from banaserve.sim.trace import cut
from banaserve_bench.simulation.lengths import MEASURED, draw_measured

LENGTH_KINDS = ("fixed", "lognormal", "measured", "uniform")
_MOST_TOKENS = 1e9
_MOST_REQUESTS = 1e8
"""Largest number of arrivals: more than a machine's memory holds."""
_LONGEST_S = 1e7
"""Longest time of a load: an idle system is simulated too, for minutes."""


def check_duration(load_s: float) -> None:
    """Check that a simulation of a load of ``load_s`` ends.

    Raises:
        UserError: It would not.
    """
    if load_s > _LONGEST_S:
        raise UserError(f"the load lasts {load_s:.3g} s: give at most {_LONGEST_S:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Distribution of token counts, cut to ``low`` and ``high``.

    Attributes:
        kind: Kind of the distribution: ``fixed`` is always ``mean``; ``uniform`` is between ``low``
            and ``high``; ``lognormal`` has this ``mean`` and ``spread``, the deviation of the
            logarithm; ``measured`` is the distribution named by ``of``.
    """

    kind: str
    mean: float = 0.0
    low: int = 1
    high: int = 1_000_000
    spread: float = 0.5
    of: str = ""

    def __post_init__(self) -> None:
        check_known("kind of lengths", self.kind, LENGTH_KINDS)
        if self.kind == "measured":
            check_known("measured lengths", self.of, MEASURED)
        if not 1 <= self.low <= self.high:
            raise UserError(f"lengths from {self.low} to {self.high}: give 1 <= low <= high")
        if self.kind in ("fixed", "lognormal") and not 1 <= self.mean <= _MOST_TOKENS:
            raise UserError(f"mean is {self.mean}: give a length from 1 to {_MOST_TOKENS:g}")
        if not 0 <= self.spread <= 5:
            raise UserError(f"spread is {self.spread}: give a number in [0, 5]")

    def draw(self, draws: random.Random) -> int:
        if self.kind == "lognormal":
            value = draws.lognormvariate(math.log(self.mean) - self.spread**2 / 2, self.spread)
        elif self.kind == "fixed":
            value = self.mean
        elif self.kind == "uniform":
            value = draws.randint(self.low, self.high)
        else:
            value = draw_measured(self.of, draws)
        count = round(value)
        return self.low if count < self.low else min(count, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Arrivals of requests over time.

    Attributes:
        rate_per_s: Mean arrivals per second; gaps are gamma distributed.
        variation: Coefficient of variation of the gaps: 1 is Poisson, more than 1 gives bursts.
        swing_fraction: Swing of the rate as a share of its mean, as in a day: lowest at the start,
            highest half a period later.
        period_s: Period of the swing, in seconds; 0 is the whole duration.
    """

    duration_s: float
    rate_per_s: float
    variation: float = 1.0
    swing_fraction: float = 0.0
    period_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("duration_s", "rate_per_s", "variation"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UserError(f"{name} is {value!r}: give more than 0")
        check_duration(self.duration_s)
        if not 1e-3 <= self.variation <= 1e3:
            raise UserError(f"variation is {self.variation}: give a number in [0.001, 1000]")
        if (number := self.rate_per_s * self.duration_s) > _MOST_REQUESTS:
            raise UserError(f"{number:.3g} requests would arrive: give at most {_MOST_REQUESTS:g}")
        if not 0 <= self.swing_fraction < 1:
            raise UserError(f"swing_fraction is {self.swing_fraction}: give a share in [0, 1)")
        if not 0 <= self.period_s < math.inf:
            raise UserError(f"period_s is {self.period_s}: give 0 or more")

    def times_s(self, draws: random.Random) -> Iterator[float]:
        """Yield the arrivals in [0, duration), ascending."""
        shape = self.variation**-2
        scale = 1 / (self.rate_per_s * shape)
        even_s = at_s = 0.0
        while True:
            # Gaps are drawn for an even rate, then time is warped so that the rate swings.
            even_s += draws.gammavariate(shape, scale)
            at_s = self._bent(even_s, at_s) if self.swing_fraction else even_s
            if at_s >= self.duration_s:
                return
            yield at_s

    def _bent(self, even_s: float, at_s: float) -> float:
        """Solve t - swing / w sin(w t) = even_s for t, from the last arrival on, by bisection."""
        w = math.tau / (self.period_s or self.duration_s)
        depth_s = self.swing_fraction / w
        low_s, high_s = at_s, even_s + depth_s
        while high_s - low_s > 1e-6:
            middle_s = (low_s + high_s) / 2
            if middle_s - depth_s * math.sin(w * middle_s) < even_s:
                low_s = middle_s
            else:
                high_s = middle_s
        return high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPhase(Arrivals):
    """Phase of a workload: arrivals, and the distributions of their lengths."""

    prompt: Lengths
    output: Lengths


def drawn(phases: Sequence[LoadPhase], seed: int, repeat: int = 1) -> Iterator[SimRequest]:
    """Yield the requests of ``phases``, phase by phase, ``repeat`` times over."""
    draws = random.Random(f"{seed} workload")
    start_s, number = 0.0, 0
    for phase in [*phases] * repeat:
        for at_s in phase.times_s(draws):
            prompt, output = phase.prompt.draw(draws), phase.output.draw(draws)
            yield SimRequest(number, start_s + at_s, prompt, output)
            number += 1
        start_s += phase.duration_s


Pair = Callable[[random.Random], tuple[int, int]]


def arriving(
    arrivals: Arrivals, pair: Pair, seed: int, max_tokens: int | None = None
) -> Iterator[SimRequest]:
    """Yield requests whose prompt and output tokens ``pair`` draws, cut to ``max_tokens``."""
    draws = random.Random(f"{seed} workload")
    for number, at_s in enumerate(arrivals.times_s(draws)):
        prompt, output = cut(*pair(draws), max_tokens)
        yield SimRequest(number, at_s, prompt, output)
