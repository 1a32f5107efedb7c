"""Interface of prefix trees, which remember the prompts that each target was sent."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from banaserve._native import PrefixTree as _NativePrefixTree
from banaserve.orchestrator.replicas.interface import ReplicaId

ENTRY_BYTES = 256
"""Charged for each node and target beside the label: what the C++ tree needs for them at most."""

LRU, FIFO = "lru", "fifo"
ORDERS = (LRU, FIFO)


class TreeEntry(NamedTuple):
    """A node of a tree, as ``dump`` tells it.

    Attributes:
        depth: 0 for a child of the root.
        label: What follows after the parent's prompt; whole units.
        stamps: When each target was last put there (LRU) or first (FIFO), counted in insertions.
    """

    depth: int
    label: bytes
    stamps: dict[ReplicaId, int]


class PrefixTree(Protocol):
    """A compressed radix tree over prompts; each node lists the targets that were sent it.

    A prompt is bytes, compared unit by unit. The targets of a node are among its parent's. A
    target is charged ``len(label) + ENTRY_BYTES`` for each of its nodes; the whole tree is charged
    each label once and ``ENTRY_BYTES`` for each node and target. When a bound is passed, leaves
    go: the target's own, or those of the target that is charged most. LRU takes the leaf that was
    inserted longest ago last, FIFO first. Matching changes nothing.
    """

    def add(self, prompt: bytes, target: ReplicaId) -> None:
        """Records that ``target`` has ``prompt``, cut to what fits its bound."""
        ...

    def match(self, prompt: bytes) -> dict[ReplicaId, int]:
        """Returns how many leading units of ``prompt`` each target has; only those with any."""
        ...

    def trim(self, prompt: bytes, target: ReplicaId, num_units: int) -> None:
        """Records that of ``prompt`` the target has the first ``num_units`` at most."""
        ...

    def forget(self, target: ReplicaId) -> None:
        """Removes ``target`` from every node."""
        ...

    def dump(self) -> list[TreeEntry]:
        """Returns the nodes, parents before children, children in the order of their labels."""
        ...

    def target_bytes(self, target: ReplicaId) -> int:
        """Returns what ``target`` is charged; 0 where it is not known."""
        ...

    @property
    def num_bytes(self) -> int:
        """What the whole tree is charged."""
        ...

    @property
    def num_nodes(self) -> int:
        """Without the root."""
        ...


def make_tree(
    unit_bytes: int, max_target_bytes: int, max_bytes: int, order: str = LRU
) -> PrefixTree:
    """Returns an empty tree in C++.

    Args:
        unit_bytes: 1, 4 or 8; prompts are whole multiples.
        max_target_bytes: Bound of each target's charge.
        max_bytes: Bound of the whole tree's charge.
        order: Which leaf goes first, ``lru`` or ``fifo``.
    """
    tree: PrefixTree = _NativePrefixTree(unit_bytes, max_target_bytes, max_bytes, order == FIFO)
    return tree
