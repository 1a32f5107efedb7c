"""Who names whom as a parent, in chains of which any part may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar


class Child(Protocol):
    """What is filed under a key and may name another key as its parent."""

    @property
    def parent(self) -> bytes | None: ...


ChildT = TypeVar("ChildT", bound=Child)


class Parents(Generic[ChildT]):
    """Counts children by the parent's key, whether or not the parent is here.

    So a parent that comes back after its children is protected from its first moment on.

    Args:
        entries: Everything that is here, by key; read, never changed.
    """

    def __init__(self, entries: Mapping[bytes, ChildT]) -> None:
        self.num_children: dict[bytes, int] = {}
        self._entries = entries

    def link(self, parent: bytes | None) -> None:
        """One more child of ``parent``."""
        if parent is not None:
            self.num_children[parent] = self.num_children.get(parent, 0) + 1

    def unlink(self, parent: bytes | None) -> ChildT | None:
        """One child less; the parent's entry where that was its last."""
        if parent is None:
            return None
        self.num_children[parent] -= 1
        if self.num_children[parent]:
            return None
        del self.num_children[parent]
        return self._entries.get(parent)

    def closes_a_cycle(self, key: bytes, parent: bytes) -> bool:
        """Whether ``key`` is an ancestor of ``parent``: such blocks could never be evicted.

        Hash chains have no cycles, but a faulty client or a damaged disk can bring one. The walk is
        rare: only a key that comes back while children wait for it is followed.
        """
        if key == parent:
            return True
        ancestor: bytes | None = parent if key in self.num_children else None
        while ancestor is not None and ancestor != key:
            entry = self._entries.get(ancestor)
            ancestor = entry.parent if entry is not None else None
        return ancestor is not None
