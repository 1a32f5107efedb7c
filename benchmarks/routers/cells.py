"""Cells of ``bench routers``: load, saturation, layout and store; systems compared in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from banaserve_route.sim.replica import Accelerator
from banaserve_route.sim.world import RegionSystem, Setting
from benchmarks.routers.loads import LOADS, LoadSession, unlimited

SPEC = Accelerator(8.0, 0.04, 0.06, 200_000, 1_000_000, 32, 8192)
"""About an H100 with a model of 8B parameters and a batch of 32: free memory for 200,000 running
tokens, and memory of its host for a million cached ones."""

FAR = {("us", "eu"): 100.0, ("us", "asia"): 150.0, ("eu", "asia"): 220.0}
LAYOUTS: Mapping[str, tuple[Mapping[str, int], Mapping[str, float]]] = {
    "one region": ({"us": 4}, {"us": 1.0}),
    "three regions": ({"us": 2, "eu": 2, "asia": 2}, {"us": 0.5, "eu": 0.25, "asia": 0.25}),
}
"""Replicas of each region, and its share of the sessions."""

LEVELS = {"below": 0.6, "at": 1.0, "above": 1.5}
"""Load of the replicas, as a share of what they can do with one unlimited cache."""

CALLS = 600
SIZES = {
    "agents": 3,
    "agent graphs": 4,
    "tool use": 2,
    "ALFWorld": 5,
    "trees": 3,
    "chats": 3,
    "code": 2,
    "ServeGen": 4,
}
"""Factor of ``CALLS`` for loads whose sessions would else outlast their arrivals."""

MAX_OUTPUT_TOKENS = 1024
UNSHARED = ("Azure", "ServeGen")
"""Loads without prefixes, to which a store makes no difference."""

SYSTEMS: Mapping[str, RegionSystem] = {
    **{
        name: RegionSystem(name)
        for name in (
            *("predicted_latency", "round_robin", "random", "least_requests", "least_load"),
            *("power_of_two", "consistent_hash", "session_affinity", "prefix_cache", "cache_aware"),
            *("load_aware", "skywalker", "skywalker_ch", "gorgo_v1", "preble"),
        )
    },
    "gorgo": RegionSystem("gorgo", central=True),
}
"""Every policy: one balancer for each region, or as GORGO's proxy one for all."""

VARIANTS: Mapping[str, RegionSystem] = {
    "skywalker as-coded": RegionSystem("skywalker", "as-coded"),
    "gorgo_v1 proxy": RegionSystem("gorgo_v1", "proxy", central=True),
    "gorgo tuned": RegionSystem("gorgo", "as-coded", central=True),
    "preble published": RegionSystem("preble", "published"),
    "preble E2 only": RegionSystem("preble", options={"balance_threshold": 0}),
    "cache_aware smg": RegionSystem("cache_aware", "smg"),
}
"""Other presets, in one region without a store only."""


@dataclass(frozen=True, slots=True)
class RouterCell:
    """One comparison of all systems."""

    load: str
    level: str
    layout: str
    has_store: bool

    @property
    def name(self) -> str:
        store = "store" if self.has_store else "no store"
        return f"{self.load}, {self.level}, {self.layout}, {store}"

    @property
    def systems(self) -> Mapping[str, RegionSystem]:
        is_plain = len(LAYOUTS[self.layout][0]) == 1 and not self.has_store
        return {**SYSTEMS, **VARIANTS} if is_plain else SYSTEMS

    def setting(self, data: Path, seed: int) -> tuple[Setting, float]:
        """Return the setting of ``seed``, and the hits of one unlimited cache."""
        rng = Random(f"{seed}/{self.load}")
        sessions = list(LOADS[self.load](data, rng, CALLS * SIZES.get(self.load, 1)))
        replicas, shares = LAYOUTS[self.layout]
        level = LEVELS[self.level]
        setting, bound = open_loop(sessions, level, replicas, shares, SPEC, seed, rng)
        return replace(setting, has_store=self.has_store), bound


def open_loop(
    sessions: list[LoadSession],
    level: float,
    replicas: Mapping[str, int],
    shares: Mapping[str, float],
    spec: Accelerator,
    seed: int,
    rng: Random,
) -> tuple[Setting, float]:
    """Return a setting in which ``sessions`` arrive at a level of load, whatever is answered.

    Args:
        level: Load as a share of what the replicas can do with one unlimited cache.
        replicas: Number of replicas of each region.
        shares: Share of the sessions of each region.

    Returns:
        The setting; the hits of one unlimited cache.
    """
    work_s, bound = unlimited(sessions, spec)
    within_s = work_s / sum(replicas.values()) / level
    arrivals: dict[str, list[tuple[float, object]]] = {region: [] for region in replicas}
    for at_s, session in _timed(sessions, within_s, rng):
        draw = Random(f"{seed}/{session.key}") if session.key else rng
        [region] = draw.choices(list(shares), list(shares.values()))
        arrivals[region].append((at_s, session.program()))
    return Setting(
        replicas,
        {},
        FAR,
        spec,
        duration_s=3600.0,
        arrivals=arrivals,  # type: ignore[arg-type]
        max_output_tokens=MAX_OUTPUT_TOKENS,
    ), bound


def cells() -> Iterator[RouterCell]:
    """Yield all cells, those without a store first, and of all loads before the next level."""
    for has_store in (False, True):
        for level in LEVELS:
            for load in LOADS:
                for layout in LAYOUTS:
                    if not has_store or load not in UNSHARED:
                        yield RouterCell(load, level, layout, has_store)


def _timed(
    sessions: list[LoadSession], within_s: float, rng: Random
) -> Iterator[tuple[float, LoadSession]]:
    """Yield all ``sessions`` with their arrivals within ``within_s``: the trace's, or Poisson."""
    times_s = [session.at_s or 0.0 for session in sessions]
    first_s, last_s = min(times_s), max(times_s)
    for session in sessions:
        if session.at_s is None:
            yield rng.random() * within_s, session
        else:
            yield (session.at_s - first_s) / (last_s - first_s) * within_s, session
