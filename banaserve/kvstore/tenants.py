"""How many slots each tenant uses, and which of its blocks go first once it uses too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from banaserve.kvstore.eviction import Chains, EvictionQueue
from banaserve.kvstore.records import IndexEntry


class Tenants:
    """Slots in use by tenant. Only tenants that use a slot are remembered.

    Args:
        chains: Of the index.
        num_slots: Slots in the pool.
        quota_fraction: Largest share of the slots that one tenant may use; 1 sets no limit.
    """

    def __init__(self, chains: Chains, num_slots: int, quota_fraction: float = 1.0) -> None:
        self.has_quota = quota_fraction < 1.0
        self.quota_slots = max(1, int(num_slots * quota_fraction)) if self.has_quota else num_slots
        self._chains = chains
        self._num_slots: dict[bytes, int] = {}
        self._queues: dict[bytes, EvictionQueue] = {}

    def __len__(self) -> int:
        return len(self._num_slots)

    def is_full(self, tenant: bytes) -> bool:
        """Whether ``tenant`` may use no further slot."""
        return self.has_quota and self._num_slots.get(tenant, 0) >= self.quota_slots

    def add(self, tenant: bytes) -> None:
        """``tenant`` uses one slot more."""
        self._num_slots[tenant] = self._num_slots.get(tenant, 0) + 1
        if self.has_quota and tenant not in self._queues:
            self._queues[tenant] = EvictionQueue(self._chains)

    def remove(self, tenant: bytes) -> None:
        """``tenant`` uses one slot less."""
        self._num_slots[tenant] -= 1
        if not self._num_slots[tenant]:
            del self._num_slots[tenant]
            self._queues.pop(tenant, None)

    def offer(self, entry: IndexEntry) -> None:
        """``entry`` may have become evictable."""
        if self.has_quota:
            self._queues[entry.tenant].offer(entry)

    def forget(self, entry: IndexEntry) -> None:
        """``entry`` has left the index."""
        if self.has_quota:
            self._queues[entry.tenant].forget(entry)

    def pop(self, tenant: bytes) -> IndexEntry | None:
        """The evictable block of ``tenant`` that was used longest ago."""
        return self._queues[tenant].pop()

    def check(self, entries: Mapping[bytes, IndexEntry], in_use: Iterable[IndexEntry]) -> None:
        """Assert that the counts are right and that nobody is over its quota."""
        assert self._num_slots == Counter(entry.tenant for entry in in_use)
        assert all(number <= self.quota_slots for number in self._num_slots.values())
        assert set(self._queues) == (set(self._num_slots) if self.has_quota else set())
        for tenant, queue in self._queues.items():
            queue.check(entries, tenant)
