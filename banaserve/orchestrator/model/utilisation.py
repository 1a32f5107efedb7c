"""Utilisation of instances, and the objectives: BanaServe Eqs. 1, 18, 24, 26, 27, 31, 33 to 35."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key")


def prefill_flops(num_layers: int, layer_token_flops: float, tokens: int) -> float:
    """Work of a prefill: n_p C_l B_sz L_in, without attention (BanaServe Eq. 24).

    Args:
        tokens: B_sz L_in, the tokens that are computed; cached ones are not.
    """
    return num_layers * layer_token_flops * tokens


def decode_step_flops(num_layers: int, layer_token_flops: float, batch: int) -> float:
    """Work of one decode step: n_d C_l B_sz (BanaServe Eq. 26, corrected).

    Printed with L_gen, the work of a whole generation, which no interval of Eq. 27 contains.
    """
    return num_layers * layer_token_flops * batch


def attention_flops(num_layers: int, hidden_size: int, computed: int, context: int) -> float:
    """Work that Eqs. 24 and 26 leave out: scores and values of ``computed`` tokens over a context.

    4 d_model for each pair (two products of a multiply and an add); in a causal prefill of n
    tokens the mean context is n / 2.
    """
    return 4.0 * num_layers * hidden_size * computed * context


def compute_utilisation(flops: float, flops_per_s: float, interval_s: float) -> float:
    """Share of the possible work that was done (BanaServe Eq. 27, corrected), at most 1.

    Printed as Comp / C_gpu, which is seconds; divided by the interval it is a share.
    """
    if flops_per_s <= 0 or interval_s <= 0:
        raise ValueError("flops_per_s and interval_s are above 0")
    return min(1.0, flops / (flops_per_s * interval_s))


def worst(loads: Mapping[Key, float]) -> float:
    """The objective max_g U_g (BanaServe Eq. 1); 0 of no loads."""
    return max(loads.values(), default=0.0)


def mean(loads: Mapping[Key, float]) -> float:
    """U_avg of BanaServe Eq. 19: to report, not to maximise.

    Migration only moves work, so it hardly changes the mean: Eq. 18 pulls against Eq. 1.
    """
    return sum(loads.values()) / len(loads) if loads else 0.0


@dataclass(frozen=True, slots=True)
class Objective:
    """BanaServe Eqs. 18 and 31, made to have one unit: alpha U - beta T + gamma Theta.

    The paper adds a share, seconds and tokens a second without weights; each term is divided by
    what it is compared with. The migration policy does not use it (nor does Algorithm 1); it
    ranks whole runs.

    Attributes:
        latency_s: A latency that counts as 1.
        tokens_per_s: A throughput that counts as 1.
    """

    latency_s: float
    tokens_per_s: float
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0

    def value(self, utilisation: float, latency_s: float, tokens_per_s: float) -> float:
        return (
            self.alpha * utilisation
            - self.beta * latency_s / self.latency_s
            + self.gamma * tokens_per_s / self.tokens_per_s
        )


def overloaded(loads: Mapping[Key, float], delta: float) -> list[Key]:
    """{d | load[d] - min(load) > delta} (BanaServe Eq. 33), in the order of ``loads``."""
    lowest = min(loads.values(), default=0.0)
    return [key for key, load in loads.items() if load - lowest > delta]


def underloaded(loads: Mapping[Key, float], delta: float) -> list[Key]:
    """{d | max(load) - load[d] > delta} (BanaServe Eq. 33); may share members with the other."""
    highest = max(loads.values(), default=0.0)
    return [key for key, load in loads.items() if highest - load > delta]


def published_efficiency(gap_before: float, gap_after: float, cost_s: float) -> float:
    """Benefit / cost of BanaServe Eq. 35, in 1/s: the gap of Eq. 34 that closes, a second."""
    return (gap_before - gap_after) / cost_s


PRESSURE_POWER = 4
"""Steep enough that the fullest resources decide, and no steeper: see ``pressure``."""


def pressure(load: float) -> float:
    """What one resource at ``load`` adds to the objective: U^4 / 4 (stands in for Eq. 1).

    The maximum of Eq. 1 does not fall when one of two equal maxima is relieved, which is figure
    2(b): compute of one instance and memory of the other are both at 0.95. A sum of convex terms
    falls with each useful move, which makes the repaired algorithm terminate, and is nearly the
    maximum where one is far above the rest. Relief counts in full at load 1 and an eighth of it
    at load 1/2. Not cut at 1: what waits is load too.
    """
    return load**PRESSURE_POWER / PRESSURE_POWER


def efficiency(pressure_fall: float, horizon_s: float, cost_s: float) -> float:
    """Benefit / cost of BanaServe Eq. 35, corrected: both in seconds.

    The benefit is the fall of the pressure over ``horizon_s``, for which the load is expected to
    last; Eq. 35's fall of the pair's gap may leave the fullest instance as full as it was.
    """
    return pressure_fall * horizon_s / cost_s if cost_s > 0 else float("inf")
