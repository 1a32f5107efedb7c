"""Interface of prefix trees, which record the prompts sent to each target."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from banaserve._native import PrefixTree as _NativePrefixTree
from banaserve_route.policies.interface import ReplicaId

ENTRY_BYTES = 256
"""Charge of a node for each target, besides its label: the maximum memory in the C++ tree."""

LRU, FIFO = "lru", "fifo"
ORDERS = (LRU, FIFO)


class TreeEntry(NamedTuple):
    """A node of a tree, as ``dump`` returns it.

    Attributes:
        depth: Depth of the node; 0 for a child of the root.
        label: Part of the prompt after the parent's prompt, in whole units.
        stamps: Number of the insertion that put each target there last (LRU) or first (FIFO).
    """

    depth: int
    label: bytes
    stamps: dict[ReplicaId, int]


class PrefixTree(Protocol):
    """A compressed radix tree over prompts; each node lists the targets that got its prompt.

    A prompt is bytes, compared unit by unit. The targets of a node are a subset of its parent's. A
    target is charged ``len(label) + ENTRY_BYTES`` for each of its nodes; the whole tree is charged
    each label once and ``ENTRY_BYTES`` for each node and target. When a bound is exceeded, leaves
    are evicted: the target's own, or those of the target with the largest charge. LRU evicts the
    leaf whose last insertion is the oldest, FIFO the leaf whose first insertion is. Matching
    changes nothing.
    """

    def add(self, prompt: bytes, target: ReplicaId) -> None:
        """Record that ``target`` has ``prompt``, truncated to the target's bound."""
        ...

    def match(self, prompt: bytes, tokens_per_unit: float = 1.0) -> dict[ReplicaId, int]:
        """Return how many leading tokens of ``prompt`` each target has, whole ones without zeros.

        Without ``tokens_per_unit``, units are counted.
        """
        ...

    def trim(self, prompt: bytes, target: ReplicaId, num_units: int) -> None:
        """Record that the target has at most the first ``num_units`` of ``prompt``."""
        ...

    def forget(self, target: ReplicaId) -> None:
        """Remove ``target`` from every node."""
        ...

    def dump(self) -> list[TreeEntry]:
        """Return the nodes, parents before children, children in the order of their labels."""
        ...

    def target_bytes(self, target: ReplicaId) -> int:
        """Return the charge of ``target``; 0 for an unknown one."""
        ...

    @property
    def num_bytes(self) -> int:
        """Charge of the whole tree."""
        ...

    @property
    def num_nodes(self) -> int:
        """Number of nodes, without the root."""
        ...


class _Tree(_NativePrefixTree):
    """The tree in C++, whose entries have names here."""

    def dump(self) -> list[TreeEntry]:  # type: ignore[override]
        return [TreeEntry(*entry) for entry in super().dump()]


def make_tree(
    unit_bytes: int, max_target_bytes: int, max_bytes: int, order: str = LRU
) -> PrefixTree:
    """Return an empty tree in C++.

    Args:
        unit_bytes: Size of a unit: 1, 4 or 8; prompts are whole multiples.
        max_target_bytes: Bound of each target's charge.
        max_bytes: Bound of the whole tree's charge.
        order: Order of eviction of leaves, ``lru`` or ``fifo``.
    """
    tree: PrefixTree = _Tree(unit_bytes, max_target_bytes, max_bytes, order == FIFO)
    return tree
