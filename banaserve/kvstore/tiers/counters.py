"""Counters and speeds that every tier measures."""

from __future__ import annotations

from typing import Any

import msgspec

from banaserve.kvstore.stats import TierCounts, TierStats
from banaserve.kvstore.tiers.interface import TierOutcome

_WEIGHT_OF_THE_PAST = 0.95


class Throughput:
    """Bytes per second while at least one transfer is under way, over the last few dozen."""

    def __init__(self) -> None:
        self._num_under_way = 0
        self._since_s = 0.0
        self._bytes = 0.0
        self._seconds = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Speed in bytes per second; 0 until the first transfer has ended."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0

    def begin(self, now_s: float) -> None:
        """Note that a transfer begins."""
        if not self._num_under_way:
            self._since_s = now_s
        self._num_under_way += 1

    def end(self, now_s: float, num_bytes: int) -> None:
        """Note that a transfer has ended; ``num_bytes`` is 0 if it failed."""
        self._num_under_way -= 1
        self._bytes = self._bytes * _WEIGHT_OF_THE_PAST + num_bytes
        self._seconds = self._seconds * _WEIGHT_OF_THE_PAST + now_s - self._since_s
        self._since_s = now_s


class TierCounters(TierCounts, kw_only=True):
    """Counters and speeds of a tier since its start."""

    load_speed: Throughput = msgspec.field(default_factory=Throughput)
    store_speed: Throughput = msgspec.field(default_factory=Throughput)

    def end_load(self, now_s: float, num_bytes: int, outcome: TierOutcome) -> None:
        """Count a load that has ended, of a block of ``num_bytes``."""
        is_done = outcome is TierOutcome.DONE
        self.loads += is_done
        self.loaded_bytes += num_bytes * is_done
        self.load_speed.end(now_s, num_bytes * is_done)
        self._count_failure(outcome)

    def end_store(self, now_s: float, num_bytes: int, outcome: TierOutcome) -> None:
        """Count a store that has ended, of a block of ``num_bytes``."""
        is_done = outcome is TierOutcome.DONE
        self.stores += is_done
        self.stored_bytes += num_bytes * is_done
        self.store_speed.end(now_s, num_bytes * is_done)
        self._count_failure(outcome)

    def _count_failure(self, outcome: TierOutcome) -> None:
        self.missing += outcome is TierOutcome.MISSING
        self.corrupt += outcome is TierOutcome.CORRUPT
        self.failures += outcome is TierOutcome.FAILED

    def stats(self, name: str, **gauges: Any) -> TierStats:
        """Return the counters together with ``gauges``, which are fields of ``TierStats``."""
        counts = {name: getattr(self, name) for name in TierCounts.__struct_fields__}
        return TierStats(
            name=name,
            load_bytes_per_s=self.load_speed.bytes_per_s,
            store_bytes_per_s=self.store_speed.bytes_per_s,
            **counts,
            **gauges,
        )
