"""Base class of the policies that record in a prefix tree where each prompt was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from banaserve_route.policies.interface import (
    Flight,
    Generator,
    Need,
    ReplicaId,
    ReplicaView,
    Request,
)
from banaserve_route.policies.policy import Policy, check_choice, check_range
from banaserve_route.policies.prefixes.tree import LRU, ORDERS, make_tree


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """Options of every policy with a prefix tree.

    Attributes:
        max_tree_bytes: Bound of the charge of one target, in bytes.
        max_total_bytes: Bound of the charge of the whole tree, in bytes.
        eviction: Order of eviction of leaves, ``lru`` or ``fifo``.
        trims: True to forget the rest of a prompt if a replica reports fewer cached tokens of it
            than expected: evictions are known only where replicas publish KV events.
    """

    max_tree_bytes: int = 1 << 24
    max_total_bytes: int = 1 << 30
    eviction: str = LRU
    trims: bool = True

    def __post_init__(self) -> None:
        bytes_range = (0, 1 << 44)
        check_range(self, {"max_tree_bytes": bytes_range, "max_total_bytes": bytes_range})
        check_choice("eviction", self.eviction, ORDERS)


class TreePolicy(Policy):
    """Policy with ``TreeOptions`` as its ``options``; a prompt is recorded when it is sent."""

    needs: frozenset[Need] = frozenset({Need.REQUEST, Need.CACHES})

    def __init__(self, options: Any, generator: Generator, unit_bytes: int) -> None:
        super().__init__(options, generator, unit_bytes)
        self.tree = make_tree(
            unit_bytes, options.max_tree_bytes, options.max_total_bytes, options.eviction
        )

    def hits(self, request: Request) -> dict[ReplicaId, int]:
        """Return how many prompt tokens each target is expected to have cached, without zeros.

        What is known from events replaces the tree's estimate, or raises it where it is a minimum.
        """
        hits = self._estimated(request)
        for target, known in request.known_hits.items():
            estimated = 0 if known.is_exact else hits.get(target, 0)
            if tokens := max(known.tokens, estimated):
                hits[target] = tokens
            else:
                hits.pop(target, None)
        return hits

    def _estimated(self, request: Request) -> dict[ReplicaId, int]:
        """Return the hits by the prompts that were sent before, without zeros."""
        num_units = len(request.prompt) // self.unit_bytes
        return self.tree.match(request.prompt, request.num_tokens / num_units) if num_units else {}

    def longest_hit(
        self, candidates: Sequence[ReplicaView], hits: dict[ReplicaId, int]
    ) -> tuple[ReplicaView, int] | None:
        """Return the candidate with the longest hit, and its hit; None without one.

        Among equals, the one with the fewest outstanding requests is taken.
        """
        most = 0
        best: list[ReplicaView] = []
        for view in [view for view in candidates if view.id in hits]:
            hit = hits[view.id]
            if hit > most or not best:
                most, best = hit, [view]
            elif hit == most:
                best.append(view)
        if not best:
            return None
        place = self.least([view.outstanding for view in best]) if len(best) > 1 else 0
        return best[place], most

    def on_sent(self, flight: Flight) -> None:
        self.tree.add(flight.request.prompt, flight.target)

    def on_finished(self, flight: Flight) -> None:
        self.correct(flight)

    def correct(self, flight: Flight) -> None:
        """Forget the part of an expected hit that the replica reports not to have had."""
        cached, expected = flight.cached_tokens, flight.decision.hit_tokens
        request = flight.request
        if not self.options.trims or cached is None or cached >= expected:
            return
        if not self.tree.target_bytes(flight.target):
            return
        # The prompt itself is cached by now; only the expectation for other prompts was wrong.
        units_per_token = len(request.prompt) // self.unit_bytes / request.num_tokens
        self.tree.trim(request.prompt, flight.target, int(cached * units_per_token))
        self.tree.add(request.prompt, flight.target)

    def on_replica_gone(self, target: ReplicaId) -> None:
        self.tree.forget(target)
