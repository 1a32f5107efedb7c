"""Preble's global tree: the prefixes that each replica caches, and how often they are used.

Each replica's cache is modelled as in the engine: a fixed number of tokens, the least recently used
leaf is evicted first. So the evictions by a request are known before it is sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from banaserve_route.policies.interface import ReplicaId
from banaserve_route.policies.preble.costs import WindowSum

MIN_TOKENS = 16
"""Minimum charge of a node: an engine caches whole blocks, and short nodes need memory, too."""

_STRIDE = 512


@dataclass(eq=False, slots=True)
class Node:
    """A piece of prompts.

    Attributes:
        start: Number of tokens of the prompt before the piece.
        tokens: Number of tokens of the piece itself.
        hits: Number of requests for the piece, by replica that caches it.
        waits_ms: Sum of the queueing times of requests whose deepest cached node this was.
        num_waits: Number of these requests.
    """

    label: bytes
    parent: Node | None
    start: float
    tokens: float
    waits_ms: WindowSum
    num_waits: WindowSum
    children: dict[bytes, Node] = field(default_factory=dict)
    hits: dict[ReplicaId, WindowSum] = field(default_factory=dict)

    @property
    def charge(self) -> float:
        """Cache that the node takes, in tokens."""
        return max(self.tokens, MIN_TOKENS)


def key_node(node: Node) -> Node:
    """Return the last node on the path to ``node`` with more tokens than all before it.

    Paper, A.7: most requests share such a portion of their prompts, and are placed by it.
    """
    while node.parent is not None and node.tokens <= node.start:
        node = node.parent
    return node


class CacheTree:
    """The tree, and each replica's cached nodes from least to most recently used."""

    def __init__(self, unit_bytes: int, capacity_tokens: int, window_s: float) -> None:
        self._unit = unit_bytes
        self._capacity = capacity_tokens
        self._window_s = window_s
        self._root = self._node(b"", None, 0.0, 0.0)
        self._lru: dict[ReplicaId, OrderedDict[Node, None]] = {}
        self._used: dict[ReplicaId, float] = {}

    def match(self, prompt: bytes, tokens_per_unit: float) -> dict[ReplicaId, tuple[float, Node]]:
        """Return the matched tokens and the last node of each replica with a prefix of it."""
        matched: dict[ReplicaId, tuple[float, Node]] = {}
        for node, common in self._path(prompt):
            tokens = node.start + common / self._unit * tokens_per_unit
            for target in node.hits:
                matched[target] = (tokens, node)
        return matched

    def add(self, prompt: bytes, tokens_per_unit: float, target: ReplicaId, now_s: float) -> None:
        """Record that ``target`` computes and then caches ``prompt``."""
        rest = prompt[: len(prompt) - len(prompt) % self._unit]
        limit = int(self._capacity / tokens_per_unit) * self._unit if tokens_per_unit else 0
        rest = rest[:limit]
        node = self._root
        path = []
        grown = {target}
        while rest:
            child = node.children.get(rest[: self._unit])
            if child is None:
                tokens = len(rest) / self._unit * tokens_per_unit
                child = self._node(rest, node, node.start + node.tokens, tokens)
                node.children[rest[: self._unit]] = child
            common = common_bytes(child.label, rest, self._unit)
            if common < len(child.label):
                child = self._split(child, common)
                grown |= child.hits.keys()
            path.append(child)
            node, rest = child, rest[common:]
        if not path:
            return
        for node in path:
            self._hold(node, target, now_s)
        self._touch(path, target)
        for one in grown:
            self._evict(one)

    def would_evict(self, target: ReplicaId, tokens: float) -> Iterator[Node]:
        """Yield the nodes that ``target`` would evict to make room for ``tokens`` more tokens."""
        excess = self._used.get(target, 0.0) + tokens - self._capacity
        for node in self._lru.get(target, ()):
            if excess <= 0:
                return
            yield node
            excess -= node.charge

    def trim(
        self, prompt: bytes, tokens_per_unit: float, target: ReplicaId, num_tokens: float
    ) -> None:
        """Record that the target has at most the first ``num_tokens`` of ``prompt``."""
        for node, common in list(self._path(prompt)):
            if node.start + common / self._unit * tokens_per_unit > num_tokens + 0.5:
                self._release_below(node, target)
                return

    def forget(self, target: ReplicaId) -> None:
        """Forget everything that ``target`` cached."""
        while self._lru.get(target):
            self._release(next(iter(self._lru[target])), target)
        self._lru.pop(target, None)
        self._used.pop(target, None)

    def split(self, node: Node, target: ReplicaId, now_s: float) -> None:
        """Forget the subtrees of ``node`` at ``target`` that have about half of its requests.

        Later requests for them match at every replica that caches ``node`` alone.
        """
        below = [child for child in node.children.values() if target in child.hits]
        requests = {child: child.hits[target].total(now_s) for child in below}
        kept = left = 0.0
        for child in sorted(below, key=requests.__getitem__, reverse=True):
            if kept <= left:
                kept += requests[child]
            else:
                left += requests[child]
                self._release_below(child, target)

    def used_tokens(self, target: ReplicaId) -> float:
        """Return the modelled use of the target's cache, in tokens."""
        return self._used.get(target, 0.0)

    def check(self) -> None:
        """Assert the invariants, for tests."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            assert node.hits, "a node without a target"
            assert node.parent is not None
            assert node.parent is self._root or node.hits.keys() <= node.parent.hits.keys()
        for target, nodes in self._lru.items():
            used = sum(node.charge for node in nodes)
            assert abs(used - self._used[target]) < 1e-3 * max(1.0, used)
            assert used <= self._capacity + 1e-6
            order = {node: place for place, node in enumerate(nodes)}
            assert all(order[node] < order.get(node.parent, len(order)) for node in nodes)  # type: ignore[arg-type]

    def _path(self, prompt: bytes) -> Iterator[tuple[Node, int]]:
        node, at = self._root, 0
        while (child := node.children.get(prompt[at : at + self._unit])) is not None:
            common = common_bytes(child.label, prompt[at : at + len(child.label)], self._unit)
            yield child, common
            if common < len(child.label):
                return
            node, at = child, at + common

    def _node(self, label: bytes, parent: Node | None, start: float, tokens: float) -> Node:
        waits = WindowSum(self._window_s), WindowSum(self._window_s)
        return Node(label, parent, start, tokens, *waits)

    def _split(self, node: Node, at: int) -> Node:
        """Insert a parent of ``node`` with its first ``at`` bytes, cached at the same replicas."""
        parent = node.parent
        assert parent is not None
        share = at / len(node.label)
        upper = self._node(node.label[:at], parent, node.start, node.tokens * share)
        parent.children[node.label[: self._unit]] = upper
        old_charge = node.charge
        node.label, node.parent = node.label[at:], upper
        node.start, node.tokens = node.start + upper.tokens, node.tokens * (1 - share)
        upper.children[node.label[: self._unit]] = node
        ancestors = list(self._ancestors(upper))
        for target, hits in node.hits.items():
            upper.hits[target] = WindowSum(hits.window_s, hits.recent, hits.before, hits._half)
            self._used[target] += upper.charge + node.charge - old_charge
            self._touch([*reversed(ancestors), upper], target)
        return upper

    def _ancestors(self, node: Node) -> Iterator[Node]:
        while node.parent is not None and node.parent is not self._root:
            node = node.parent
            yield node

    def _hold(self, node: Node, target: ReplicaId, now_s: float) -> None:
        if target not in node.hits:
            node.hits[target] = WindowSum(self._window_s)
            self._used[target] = self._used.get(target, 0.0) + node.charge
        node.hits[target].add(1, now_s)

    def _touch(self, path: list[Node], target: ReplicaId) -> None:
        """Make ``path`` the most recently used nodes, its start last: leaves are evicted first."""
        lru = self._lru.setdefault(target, OrderedDict())
        for node in reversed(path):
            lru[node] = None
            lru.move_to_end(node)

    def _evict(self, target: ReplicaId) -> None:
        lru = self._lru[target]
        while lru and self._used[target] > self._capacity:
            self._release(next(iter(lru)), target)

    def _release_below(self, node: Node, target: ReplicaId) -> None:
        if target not in node.hits:
            return
        # No recursion: a path may be deeper than Python's recursion limit.
        below = [node]
        for one in below:
            below += [child for child in one.children.values() if target in child.hits]
        for one in reversed(below):
            self._release(one, target)

    def _release(self, node: Node, target: ReplicaId) -> None:
        del node.hits[target]
        del self._lru[target][node]
        self._used[target] -= node.charge
        if not node.hits and node.parent is not None:
            node.parent.children.pop(node.label[: self._unit], None)


def common_bytes(one: bytes, other: bytes, unit_bytes: int) -> int:
    """Return the number of bytes of the leading units that are equal."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length - length % unit_bytes
    same = 0
    while one[same : same + _STRIDE] == other[same : same + _STRIDE]:
        same += _STRIDE
    while one[same] == other[same]:
        same += 1
    return same - same % unit_bytes
