"""Clusters to decide over, and the load and the cluster that are simulated."""

from __future__ import annotations

import random
from collections.abc import Iterator

from banaserve.errors import UserError
from banaserve.sim.request import SimRequest
from banaserve.sim.system import System, preset
from banaserve.sim.workload import Lengths, Phase, drawn
from banaserve.types import (
    ClusterView,
    InstanceFacts,
    InstanceId,
    InstanceReport,
    InstanceView,
    Role,
)

EVEN, RANDOM = (0.5, 0.54), (0.0, 1.0)
"""Ranges of both loads."""

_NOW_S = 100.0
_ROLES = (("p", Role.PREFILL), ("d", Role.DECODE))


def cluster(size: int, seed: int, spread: tuple[float, float], facts: InstanceFacts) -> ClusterView:
    """Returns ``size`` instances, half of them of each role, with loads drawn from ``spread``."""
    draws = random.Random(f"{seed} {size}")
    views = {}
    for number in range(size):
        letter, role = _ROLES[number % 2]
        name = InstanceId(f"{letter}{number:05}")
        compute, memory = draws.uniform(*spread), draws.uniform(*spread)
        report = InstanceReport(48, 0, memory, compute, _NOW_S, step_s=0.03)
        views[name] = InstanceView(name, role, True, report, 48, 0, 8000.0, facts)
    return ClusterView(_NOW_S, views)


def system(instances: int, cell_size: int) -> System:
    """Returns prefill and decode apart, half of the instances each, with migration.

    No prefixes are kept: the requests of ``load`` share none, and the cells then share nothing.

    Raises:
        UserError: Too few instances, or cells that would lack a role.
    """
    if instances < 2 or instances % 2:
        raise UserError(f"instances is {instances}: give an even number")
    half = instances // 2
    return preset("banaserve", prefill=half, decode=half, cell_size=cell_size, cache="none")


def load(rate_per_s: float, requests: int, seed: int) -> Iterator[SimRequest]:
    """Yields about ``requests`` requests: Poisson arrivals, chat-like lengths."""
    phase = Phase(
        duration_s=requests / rate_per_s,
        rate_per_s=rate_per_s,
        prompt=Lengths(kind="lognormal", mean=250, high=1500),
        output=Lengths(kind="lognormal", mean=100, high=500),
    )
    return drawn([phase], seed)
