"""Times over a network path: of a migration, of a remote module in a step, of a hand-over.

BanaServe Eqs. 4, 5, 11, 28 and 29.
"""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.base.types import Distance, InstanceFacts, InstanceView, Module

UNMEASURED = Distance(round_trip_s=1e-3, bytes_per_s=125e6)
"""Assumed network path if none has been, or could be, measured: a slow one of 1 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Link:
    """Network path between two instances.

    Attributes:
        bytes_per_s: Bandwidth B_net, for one direction.
        sync_s: Synchronisation time T_sync, once for each migration.
        hop_s: Latency of a message in one direction.
    """

    bytes_per_s: float
    sync_s: float = 0.0
    hop_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.sync_s < 0 or self.hop_s < 0:
            raise ValueError(f"{self}: bytes_per_s is above 0, the rest 0 or more")

    def over(self, distance: Distance | None) -> Link:
        """Return this link over ``distance``: no faster than measured between the machines.

        Args:
            distance: Network path between two machines; None within one machine.
        """
        if distance is None:
            return self
        bytes_per_s = min(self.bytes_per_s, distance.bytes_per_s)
        return Link(bytes_per_s, self.sync_s, max(self.hop_s, distance.round_trip_s / 2))

    def transfer_s(self, num_bytes: float) -> float:
        """Return the transfer time of ``num_bytes`` without synchronisation, in seconds."""
        return num_bytes / self.bytes_per_s


def migration_s(num_bytes: float, link: Link, realloc_s: float = 0.0) -> float:
    """Return the time of one migration, in seconds: S / B + T_sync (BanaServe Eqs. 4 and 11).

    With ``realloc_s`` it is Eq. 28, corrected. The paper has k (T_x + T_sync + T_realloc) for k
    modules in sequence; contiguous modules share one synchronisation and one reallocation: sum of
    bytes / B + T_sync + T_realloc.
    """
    return link.transfer_s(num_bytes) + link.sync_s + realloc_s


def hop_s(facts: InstanceFacts, module: Module, tokens: float, link: Link) -> float:
    """Return the seconds that a remote ``module`` adds to a step of its host, of ``tokens`` tokens.

    The paper has no such term, neither in Eq. 5 nor in Eq. 11. For layers, the hidden states of
    every token are sent to the guest and back. For heads, in every layer q, k and v are sent and o
    returns for each moved head: layers x (2 hops + (3 + 1) heads d bytes / B). Under GQA, a KV head
    moves with its ``queries_a_head`` query heads, so q and o count that many times.
    """
    if not module.heads:
        return 2 * link.hop_s + link.transfer_s(2 * tokens * facts.hidden_bytes)
    head_bytes = facts.layer_token_bytes // (2 * facts.num_kv_heads)
    token_bytes = (2 + 2 * facts.queries_a_head) * len(module.heads) * head_bytes
    return module.num_layers * (2 * link.hop_s + link.transfer_s(tokens * token_bytes))


def within_budget(before_s: float, after_s: float, budget_s: float | None) -> bool:
    """Return whether a latency keeps its budget (BanaServe Eq. 29: T(M) <= T^budget).

    A latency that already exceeds its budget must only not get worse: else an overloaded instance
    could never be relieved. None is no budget.
    """
    return budget_s is None or after_s <= max(budget_s, before_s)


def way_s(source: InstanceView, target: InstanceView, tokens: int) -> float:
    """Return the transfer time of the KV of ``tokens`` tokens between two instances, in seconds.

    The time is 0 if both are on one machine. If the KV size of a token is unknown, only a round
    trip counts, so that paths of different bandwidth look alike.
    """
    if target.id not in source.far:
        return 0.0
    way = source.far[target.id] or UNMEASURED
    return way.round_trip_s + tokens * source.kv_token_bytes / way.bytes_per_s
