"""Options of the migration policies. The paper gives no values for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.measure import STALE_AFTER_S, Scalar, ScalarLoad
from banaserve.orchestrator.control.model.moving import Link

_RANGES = {
    "delta": (0.0, 2.0),
    "delta_up": (0.0, 2.0),
    "delta_down": (0.0, 2.0),
    "delta_layers": (0.0, 2.0),
    "delta_heads": (0.0, 2.0),
    "rho": (0.0, inf),
    "rho_per_s": (0.0, inf),
    "horizon_s": (1e-3, inf),
    "migration_budget_s": (0.0, inf),
    "ttft_budget_s": (0.0, inf),
    "tpot_budget_s": (0.0, inf),
    "dwell_s": (0.0, inf),
    "role_switch_s": (0.0, inf),
    "overlap_fraction": (0.0, 1.0),
    "attention_fraction": (0.0, 1.0),
    "memory_limit_fraction": (0.01, 1.0),
    "max_away_fraction": (0.0, 1.0),
    "min_blocks_fraction": (0.0, 1.0),
    "switch_fraction": (0.0, 1.0),
    "remote_cost": (0.0, 1.0),
    "compute_weight": (0.0, 1.0),
    "stale_after_s": (1e-3, inf),
    "max_moves": (1, inf),
    "max_moves_per_instance": (1, inf),
    "min_per_role": (1, inf),
    "layers_a_move": (1, inf),
    "heads_a_move": (1, inf),
    "link_bytes_per_s": (1.0, inf),
    "link_sync_s": (0.0, inf),
    "link_hop_s": (0.0, inf),
    "hop_bytes_per_s": (0.0, inf),
    "timeout_factor": (1.0, inf),
    "min_timeout_s": (1e-3, inf),
}


_link = lru_cache(maxsize=64)(Link)
"""Cached constructor of ``Link``, which checks its arguments and is called for every candidate;
several are kept, since learnt link properties change."""


def check_ranges(options: object) -> None:
    """Check that every option is a finite number in its range, or None.

    Raises:
        UserError: An option is something else; the message names it and its range.
    """
    for name, (low, high) in _RANGES.items():
        value = getattr(options, name, None)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not isfinite(value) or not low <= value <= high:
            wanted = f"{low:g} or more" if high == inf else f"a number in [{low:g}, {high:g}]"
            raise UserError(f"{name} is {value!r}: give {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOptions:
    """Options that both presets need to predict a move.

    Attributes:
        stale_after_s: Age of a report, in seconds, above which its instance is left out.
        link_bytes_per_s: Bandwidth between two instances, in one direction.
        link_sync_s: Synchronisation time of one migration.
        link_hop_s: Latency of one message.
        hop_bytes_per_s: Bandwidth of the messages of remote modules in a step; 0 is that of the
            link, which is lower if migrations wait for disks and processes.
        weights_are_shared: True if a guest reads the weights of its own instance, so that none are
            transferred and none take memory there.
        memory_limit_fraction: Maximum share of an instance's KV blocks in use after it has taken a
            guest or a module of its own.
        min_blocks_fraction: Minimum number of KV blocks of an instance, however few it uses, as a
            share of those with nothing moved: else the next long prompt would not fit.
        max_away_fraction: Maximum share of a host's layers, and of a layer's KV heads, away.
        timeout_factor: Timeout of a step in units of its predicted time.
        min_timeout_s: Minimum timeout of a step, in seconds.
        scalar: Conversion of a load to a number, by which gaps are measured: Eq. 32 is ``sum``;
            ``weighted``; ``maximum`` is that of the fullest resource, and its gap that of any one.
        compute_weight: Weight of compute for ``weighted``, in [0, 1].
    """

    stale_after_s: float = STALE_AFTER_S
    link_bytes_per_s: float = 12.5e9
    link_sync_s: float = 0.005
    link_hop_s: float = 20e-6
    hop_bytes_per_s: float = 0.0
    weights_are_shared: bool = False
    memory_limit_fraction: float = 0.95
    min_blocks_fraction: float = 0.25
    max_away_fraction: float = 0.5
    timeout_factor: float = 5.0
    min_timeout_s: float = 5.0
    scalar: str = Scalar.MAXIMUM
    compute_weight: float = 0.5

    def __post_init__(self) -> None:
        check_ranges(self)
        ScalarLoad(self.scalar, self.compute_weight)

    @property
    def link(self) -> Link:
        return _link(self.link_bytes_per_s, self.link_sync_s, self.link_hop_s)

    @property
    def hop(self) -> Link:
        """Link for the messages of remote modules within steps."""
        return _link(self.hop_bytes_per_s or self.link_bytes_per_s, 0.0, self.link_hop_s)

    def timeout_s(self, cost_s: float) -> float:
        return max(self.min_timeout_s, self.timeout_factor * cost_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedOptions(MoveOptions):
    """Options of the preset ``published``.

    Attributes:
        delta: Imbalance threshold of Algorithm 1, on the scale of the scalar.
        rho_per_s: Efficiency ratio of Eq. 35, whose benefit has no unit and whose cost is in
            seconds.
        layers_a_move: Number of layers of one MigrateLayer.
        heads_a_move: Number of KV heads of one MigrateKVHeads, in all layers.
    """

    delta: float = 0.2
    rho_per_s: float = 0.0
    layers_a_move: int = 4
    heads_a_move: int = 1
    scalar: str = Scalar.SUM


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedOptions(MoveOptions):
    """Options of the preset ``repaired``.

    Attributes:
        delta_up: Gap above which balancing starts.
        delta_down: Gap at or below which balancing ends.
        delta_layers: Least gap at which layers may move; not below ``delta_heads``.
        delta_heads: Least gap at which KV heads may move.
        rho: Minimum ratio of benefit to cost, both in seconds.
        horizon_s: Expected duration of the present load, in seconds.
        migration_budget_s: T_budget of Eq. 2: maximum migration time of one plan, including steps
            under way, in seconds.
        ttft_budget_s: TTFT budget of Eq. 29, in seconds; None is no budget.
        tpot_budget_s: TPOT budget of Eq. 29, in seconds; None is no budget.
        dwell_s: Time after a change of an instance's placements or role in which it does not change
            again, in seconds.
        max_moves: Maximum number of steps of one plan.
        max_moves_per_instance: Maximum number of steps that one instance takes part in at once.
        overlap_fraction: Share of a guest's work that its host does not wait for, for hosts that do
            not report it: 0 if host and guest take turns, 1 if both always compute.
        attention_fraction: Share of a layer's time that is attention, which moves with its heads.
        remote_cost: Load that a model entirely away counts as, which brings modules home in time.
        role_switch_s: Cost of a role switch, in seconds: draining the running requests.
        switch_fraction: Share of the instances of both roles that may change roles within a dwell
            time, but at least two instances: the work of prefill reaches decode only later.
        min_per_role: Minimum number of instances of a role.
    """

    delta_up: float = 0.2
    delta_down: float = 0.1
    delta_layers: float = 0.2
    delta_heads: float = 0.1
    rho: float = 1.0
    horizon_s: float = 30.0
    migration_budget_s: float = 10.0
    ttft_budget_s: float | None = None
    tpot_budget_s: float | None = None
    dwell_s: float = 10.0
    max_moves: int = 4
    max_moves_per_instance: int = 1
    overlap_fraction: float = 0.0
    attention_fraction: float = 0.3
    remote_cost: float = 0.05
    role_switch_s: float = 1.0
    switch_fraction: float = 0.125
    min_per_role: int = 1

    def __post_init__(self) -> None:
        MoveOptions.__post_init__(self)
        for low, high in (("delta_down", "delta_up"), ("delta_heads", "delta_layers")):
            if getattr(self, low) > getattr(self, high):
                raise UserError(f"{low} is above {high}: give it at most {getattr(self, high)}")
