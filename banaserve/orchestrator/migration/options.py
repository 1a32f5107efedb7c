"""Options of the migration policies. The paper gives no value of any of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite

from banaserve.errors import UserError
from banaserve.orchestrator.measure import STALE_AFTER_S, Scalar, ScalarLoad
from banaserve.orchestrator.model.moving import Link

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
"""Asked for with every candidate, and checks its arguments; what is learnt of a link changes."""


def check_ranges(options: object) -> None:
    """Returns if every option is a finite number in its range, or None where that is allowed.

    Raises:
        UserError: One is not; names it and the range.
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
        stale_after_s: An instance with an older report is left out.
        link_bytes_per_s: Bandwidth between two instances, one direction.
        link_sync_s: Synchronisation of one migration.
        link_hop_s: Latency of one message.
        hop_bytes_per_s: Bandwidth for what the steps of remote modules send; 0 is that of the link,
            which is lower where migrations wait for disks and processes.
        weights_are_shared: A guest reads the weights that its instance holds already, so none
            travel and none take memory there.
        memory_limit_fraction: Share of its KV blocks that an instance may have in use after it
            took in a guest or a module of its own.
        min_blocks_fraction: Share of the KV blocks that it would have with nothing moved that an
            instance always keeps, however few it uses: else the next long prompt fits nowhere.
        max_away_fraction: Share of a host's layers, and of a layer's KV heads, that may be away.
        timeout_factor: A step's timeout in units of its predicted time.
        min_timeout_s: No timeout is shorter.
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

    @property
    def link(self) -> Link:
        return _link(self.link_bytes_per_s, self.link_sync_s, self.link_hop_s)

    @property
    def hop(self) -> Link:
        """The way of messages between steps."""
        return _link(self.hop_bytes_per_s or self.link_bytes_per_s, 0.0, self.link_hop_s)

    def timeout_s(self, cost_s: float) -> float:
        return max(self.min_timeout_s, self.timeout_factor * cost_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedOptions(MoveOptions):
    """Options of the preset ``published``.

    Attributes:
        delta: The imbalance threshold of Algorithm 1, on the scale of the scalar.
        rho_per_s: Eq. 35's efficiency ratio; its benefit has no unit and its cost is in seconds.
        layers_a_move: Layers of one MigrateLayer.
        heads_a_move: KV heads of one MigrateKVHeads, in all layers.
        scalar: How a load becomes a number; Eq. 32 adds.
    """

    delta: float = 0.2
    rho_per_s: float = 0.0
    layers_a_move: int = 4
    heads_a_move: int = 1
    scalar: str = Scalar.SUM
    compute_weight: float = 0.5

    def __post_init__(self) -> None:
        check_ranges(self)
        ScalarLoad(self.scalar, self.compute_weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedOptions(MoveOptions):
    """Options of the preset ``repaired``.

    Attributes:
        delta_up: A gap above it starts balancing.
        delta_down: A gap at or below it ends balancing.
        delta_layers: Gap from which on layers may move; above ``delta_heads``.
        delta_heads: Gap from which on KV heads may move.
        rho: Least benefit over cost, both in seconds.
        horizon_s: How long the load is expected to stay as it is.
        migration_budget_s: T_budget of Eq. 2: migration time that one plan may take, together
            with what is under way.
        ttft_budget_s: Of Eq. 29; None is no budget.
        tpot_budget_s: Of Eq. 29; None is no budget.
        dwell_s: An instance whose placements or role changed stays as it is for so long.
        max_moves: Steps of one plan.
        max_moves_per_instance: Steps that one instance takes part in at once.
        overlap_fraction: How much of a guest's work its host does not wait for: 0 where host and
            guest take turns, 1 where both always compute; of hosts that do not say it themselves.
        attention_fraction: Share of a layer's time that is attention, what moved heads take along.
        remote_cost: Load that a model wholly away would count as: brings modules home in the end.
        role_switch_s: Cost of a role switch: draining what the instance runs.
        switch_fraction: Share of the instances of both roles that may change roles within a dwell
            time, but always two: the work of prefill comes to decode only later.
        min_per_role: Instances that a role keeps.
        scalar: ``maximum`` takes the greatest gap of any resource; ``sum`` and ``weighted`` that
            of the scalar.
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
    scalar: str = Scalar.MAXIMUM
    compute_weight: float = 0.5

    def __post_init__(self) -> None:
        check_ranges(self)
        ScalarLoad(self.scalar, self.compute_weight)
        for low, high in (("delta_down", "delta_up"), ("delta_heads", "delta_layers")):
            if getattr(self, low) > getattr(self, high):
                raise UserError(f"{low} is above {high}: give it at most {getattr(self, high)}")
