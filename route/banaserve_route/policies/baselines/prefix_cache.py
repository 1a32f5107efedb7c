"""Prefix-cache routing as in AIBrix: a table of hashed blocks, and a load limit by deviation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import fmean, pstdev
from typing import Any, ClassVar

from banaserve_route.policies.interface import (
    FleetView,
    Flight,
    ReplicaId,
    ReplicaView,
    Request,
    RoutingDecision,
    RoutingReason,
)
from banaserve_route.policies.policy import Policy, check_range
from banaserve_route.policies.registry import register


@dataclass(frozen=True, slots=True)
class PrefixCacheOptions:
    """Options of ``prefix_cache``.

    Attributes:
        block_units: Number of units of a block; the prompt after the last whole block is ignored.
        max_blocks: Maximum number of blocks in the table; beyond it, the least recently used block
            is evicted.
        lifetime_s: Time without use after which a replica's block counts as evicted, in seconds.
        imbalance: Difference of outstanding requests above which only the least loaded replicas are
            candidates.
        deviations: Number of standard deviations of outstanding requests above the mean beyond
            which a replica is skipped.
    """

    block_units: int = 64
    max_blocks: int = 200_000
    lifetime_s: float = 1200.0
    imbalance: int = 8
    deviations: float = 2.0

    def __post_init__(self) -> None:
        check_range(
            self,
            {
                "block_units": (1, 1e6),
                "max_blocks": (1, 1e9),
                "lifetime_s": (0.001, 1e9),
                "imbalance": (0, 1e9),
                "deviations": (0, 1e6),
            },
        )


@register("prefix_cache")
class PrefixCache(Policy):
    """Policy that takes the longest match of a replica that is not much busier than the others.

    The defaults of AIBrix's code and of its README differ: ``aibrix-code`` and ``aibrix-readme``.
    As in AIBrix, counts are this balancer's own and live.
    """

    PRESETS: ClassVar[Mapping[str, Any]] = {
        "repaired": PrefixCacheOptions(),
        "aibrix-code": PrefixCacheOptions(block_units=4, deviations=1),
        "aibrix-readme": PrefixCacheOptions(block_units=128, imbalance=16),
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._blocks: OrderedDict[bytes, dict[ReplicaId, float]] = OrderedDict()

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        loads = [view.outstanding for view in candidates]
        reason = RoutingReason.PREFIX
        if max(loads) - min(loads) > self.options.imbalance:
            candidates = [view for view in candidates if view.outstanding == min(loads)]
            reason = RoutingReason.IMBALANCE
        hits = self._hits(request, fleet.now_s)
        limit = fmean(loads) + self.options.deviations * pstdev(loads)
        fit = [view for view in candidates if view.id in hits and view.outstanding <= limit]
        if fit:
            costs = [(-hits[view.id], view.outstanding) for view in fit]
            best = [view for view, cost in zip(fit, costs, strict=True) if cost == min(costs)]
            target = self.any_of(best).id
            return RoutingDecision(target, reason, hits[target])
        target = candidates[self.least([view.outstanding for view in candidates])].id
        return RoutingDecision(target, RoutingReason.LEAST_LOADED, hits.get(target, 0))

    def on_sent(self, flight: Flight) -> None:
        for digest in self._digests(flight.request.prompt):
            self._blocks.setdefault(digest, {})[flight.target] = flight.sent_s
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self.options.max_blocks:
            self._blocks.popitem(last=False)

    def on_replica_gone(self, target: ReplicaId) -> None:
        for digest in [digest for digest, held in self._blocks.items() if target in held]:
            del self._blocks[digest][target]
            if not self._blocks[digest]:
                del self._blocks[digest]

    def tick(self, now_s: float) -> None:
        # The first block is the least recently used: after a fresh one, no block has expired.
        while self._blocks:
            digest, held = next(iter(self._blocks.items()))
            if max(held.values()) + self.options.lifetime_s > now_s:
                return
            del self._blocks[digest]

    def _hits(self, request: Request, now_s: float) -> dict[ReplicaId, int]:
        """Return the number of prompt tokens in leading blocks that each replica has."""
        matched: dict[ReplicaId, int] = {}
        since_s = now_s - self.options.lifetime_s
        for number, digest in enumerate(self._digests(request.prompt)):
            going_on = [
                target
                for target, used_s in self._blocks.get(digest, {}).items()
                if used_s > since_s and matched.get(target, 0) == number
            ]
            if not going_on:
                break
            matched.update(dict.fromkeys(going_on, number + 1))
        block_bytes = self.options.block_units * self.unit_bytes
        tokens_per_block = request.num_tokens * block_bytes / max(1, len(request.prompt))
        return {target: int(count * tokens_per_block) for target, count in matched.items()}

    def _digests(self, prompt: bytes) -> Iterator[bytes]:
        """Yield the chained digests of the whole blocks: equal digests mean equal prefixes."""
        block_bytes = self.options.block_units * self.unit_bytes
        parent = b""
        for start in range(0, len(prompt) - block_bytes + 1, block_bytes):
            parent = blake2b(parent + prompt[start : start + block_bytes], digest_size=8).digest()
            yield parent
