"""Blocks that requests ask to keep for a time: a limited number, the oldest give way. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor
from typing import TypeVar

from banaserve.kvstore.index.records import IndexEntry

_Ordered = dict[IndexEntry, None]
GroupT = TypeVar("GroupT")


class KeptBlocks:
    """Blocks in the order in which they give way, for all tenants and for each one.

    Args:
        most: Maximum number of kept blocks.
        most_each: Maximum number of kept blocks of one tenant.
        release: Callback with a block that is no longer kept, but still in the index.
    """

    def __init__(self, most: int, most_each: int, release: Callable[[IndexEntry], None]) -> None:
        self._most = most
        self._most_each = most_each
        self._release = release
        self._all: _Ordered = {}
        self._of_tenant: dict[bytes, _Ordered] = {}
        self._until: dict[int, _Ordered] = {}
        self._look_s = 0

    def __len__(self) -> int:
        return len(self._all)

    def keep(self, entries: Sequence[IndexEntry], until_s: float) -> int:
        """Keep the blocks of a chain, parents first, at least until ``until_s``.

        Where too many are kept, the blocks of earlier calls give way first, then the last ones of
        this chain.

        Returns:
            Number of blocks that have given way.
        """
        for entry in reversed(entries):
            kept_until_s = max(entry.kept_until_s, ceil(until_s))
            if entry.kept_until_s:
                self.forget(entry)
            entry.kept_until_s = kept_until_s
            self._all[entry] = None
            self._of_tenant.setdefault(entry.tenant, {})[entry] = None
            self._until.setdefault(kept_until_s, {})[entry] = None
        num_before = len(self)
        for tenant in {entry.tenant for entry in entries}:
            while len(self._of_tenant.get(tenant, ())) > self._most_each:
                self.give_way(tenant)
        while len(self) > self._most:
            self.give_way()
        return num_before - len(self)

    def give_way(self, tenant: bytes | None = None) -> bool:
        """Release the oldest kept block, of ``tenant`` if given; return False if there is none."""
        kept = self._all if tenant is None else self._of_tenant.get(tenant)
        if not kept:
            return False
        self._end(next(iter(kept)))
        return True

    def expire(self, now_s: float) -> None:
        """Release the blocks whose time is up; looks at most once a second."""
        if now_s < self._look_s:
            return
        self._look_s = floor(now_s) + 1
        for until_s in [until_s for until_s in self._until if until_s <= now_s]:
            for entry in list(self._until[until_s]):
                self._end(entry)

    def clear(self) -> None:
        """Release all blocks."""
        while self.give_way():
            pass

    def forget(self, entry: IndexEntry) -> None:
        """Remove a kept block, without ``release``."""
        del self._all[entry]
        _remove(self._of_tenant, entry.tenant, entry)
        _remove(self._until, entry.kept_until_s, entry)
        entry.kept_until_s = 0

    def _end(self, entry: IndexEntry) -> None:
        self.forget(entry)
        self._release(entry)


def _remove(groups: dict[GroupT, _Ordered], name: GroupT, entry: IndexEntry) -> None:
    del groups[name][entry]
    if not groups[name]:
        del groups[name]
