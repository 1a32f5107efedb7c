"""The prefix tree in plain Python: what the C++ tree is tested against. Slow and easy to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from banaserve_route.policies.interface import ReplicaId
from banaserve_route.policies.prefixes.tree import ENTRY_BYTES, FIFO, LRU, TreeEntry


@dataclass(eq=False, slots=True)
class _Node:
    label: bytes
    parent: _Node | None
    children: dict[bytes, _Node] = field(default_factory=dict)
    stamps: dict[ReplicaId, int] = field(default_factory=dict)


class ReferencePrefixTree:
    """See ``PrefixTree``."""

    def __init__(
        self, unit_bytes: int, max_target_bytes: int, max_bytes: int, order: str = LRU
    ) -> None:
        self._unit = unit_bytes
        self._max_target_bytes = max_target_bytes
        self._max_bytes = max_bytes
        self._is_fifo = order == FIFO
        self._root = _Node(b"", None)
        self._num_adds = 0

    @property
    def num_nodes(self) -> int:
        return sum(1 for _ in self._nodes())

    @property
    def num_bytes(self) -> int:
        return sum(len(node.label) + ENTRY_BYTES * len(node.stamps) for node in self._nodes())

    def target_bytes(self, target: ReplicaId) -> int:
        return sum(len(node.label) + ENTRY_BYTES for node in self._nodes() if target in node.stamps)

    def add(self, prompt: bytes, target: ReplicaId) -> None:
        self._num_adds += 1
        room = min(self._max_target_bytes, self._max_bytes) - ENTRY_BYTES
        rest = self._whole(prompt[: max(0, room)])
        node = self._root
        while rest:
            child = node.children.get(rest[: self._unit])
            if child is None:
                child = _Node(rest, node)
                node.children[rest[: self._unit]] = child
            common = self._common(child.label, rest)
            if common < len(child.label):
                child = self._split(child, common)
            if not self._is_fifo or target not in child.stamps:
                child.stamps[target] = self._num_adds
            node, rest = child, rest[common:]
        self._evict()

    def match(self, prompt: bytes) -> dict[ReplicaId, int]:
        matched: dict[ReplicaId, int] = {}
        node, at = self._root, 0
        while (child := node.children.get(prompt[at : at + self._unit])) is not None:
            common = self._common(child.label, prompt[at:])
            at += common
            for target in child.stamps:
                matched[target] = at // self._unit
            if common < len(child.label):
                break
            node = child
        return matched

    def trim(self, prompt: bytes, target: ReplicaId, num_units: int) -> None:
        keep = num_units * self._unit
        node, at = self._root, 0
        while (child := node.children.get(prompt[at : at + self._unit])) is not None:
            common = self._common(child.label, prompt[at:])
            if at + common > keep:
                # What lies below goes too: nobody caches the end of a prompt without its middle.
                if at < keep and target in child.stamps:
                    self._split(child, keep - at)
                self._take(child, target)
                break
            if common < len(child.label):
                break
            node, at = child, at + common
        self._evict()

    def forget(self, target: ReplicaId) -> None:
        for child in list(self._root.children.values()):
            self._take(child, target)

    def dump(self) -> list[TreeEntry]:
        entries: list[TreeEntry] = []
        stack = [(child, 0) for child in self._ordered(self._root)]
        while stack:
            node, depth = stack.pop()
            stamps = dict(sorted(node.stamps.items()))
            entries.append(TreeEntry(depth, node.label, stamps))
            stack += [(child, depth + 1) for child in self._ordered(node)]
        return entries

    def check(self) -> None:
        """Asserts what always holds."""
        for node in self._nodes():
            assert node.label, "an empty label"
            assert len(node.label) % self._unit == 0, "a label of broken units"
            assert node.stamps, "a node of nobody"
            for first, child in node.children.items():
                assert child.label.startswith(first)
                assert child.parent is node
                assert child.stamps.keys() <= node.stamps.keys()
        for target in self._targets():
            assert self.target_bytes(target) <= self._max_target_bytes
        assert self.num_bytes <= self._max_bytes

    def _ordered(self, node: _Node) -> list[_Node]:
        """Last first, for a stack."""
        return [node.children[first] for first in sorted(node.children, reverse=True)]

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _whole(self, prompt: bytes) -> bytes:
        return prompt[: len(prompt) - len(prompt) % self._unit]

    def _common(self, one: bytes, other: bytes) -> int:
        """Returns the bytes of the leading units that are equal."""
        length = min(len(one), len(other))
        same = next((place for place in range(length) if one[place] != other[place]), length)
        return same - same % self._unit

    def _split(self, node: _Node, at: int) -> _Node:
        """Puts a node above ``node`` with the first ``at`` bytes and the same targets."""
        parent = node.parent
        assert parent is not None
        upper = _Node(node.label[:at], parent, stamps=dict(node.stamps))
        parent.children[node.label[: self._unit]] = upper
        node.label, node.parent = node.label[at:], upper
        upper.children[node.label[: self._unit]] = node
        return upper

    def _take(self, node: _Node, target: ReplicaId) -> None:
        """Takes ``target`` from ``node`` and all below; nodes of nobody go."""
        for child in list(node.children.values()):
            self._take(child, target)
        node.stamps.pop(target, None)
        if not node.stamps and node.parent is not None:
            del node.parent.children[node.label[: self._unit]]

    def _evict(self) -> None:
        # A split charges every target of the node for one more.
        for target in self._targets():
            while self.target_bytes(target) > self._max_target_bytes:
                self._take(self._oldest_leaf(target), target)
        while self.num_bytes > self._max_bytes:
            heaviest = max(self._targets(), key=self.target_bytes)
            self._take(self._oldest_leaf(heaviest), heaviest)

    def _targets(self) -> list[ReplicaId]:
        return sorted({target for node in self._nodes() for target in node.stamps})

    def _oldest_leaf(self, target: ReplicaId) -> _Node:
        """Unique: nodes with the same stamp lie on one path, and only its end is a leaf."""
        leaves = (
            node
            for node in self._nodes()
            if target in node.stamps
            and not any(target in child.stamps for child in node.children.values())
        )
        return min(leaves, key=lambda node: node.stamps[target])
