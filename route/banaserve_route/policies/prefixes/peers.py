"""SkyWalker's snapshot tries: prefixes that balancers of different regions exchange.

A balancer periodically sends its peers the prefixes that its replicas got recently, and keeps one
bounded tree of its peers' prefixes. Prompts do not leave the region: snapshots have hashes of whole
blocks, each chained to the previous one and keyed with the balancers' shared secret. Requests that
may not be served in all regions are never included.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import Protocol, runtime_checkable

from banaserve.base.errors import ProtocolError
from banaserve_route.policies.interface import ReplicaId, Request
from banaserve_route.policies.prefixes import snapshot as prefixes_snapshot
from banaserve_route.policies.prefixes.tree import make_tree

BLOCK_BYTES = 256
"""Number of bytes of a prompt that one unit of a snapshot stands for."""

UNIT_BYTES = 8
MAX_PROMPT_BYTES = 32 << 10
"""Maximum length of a prompt's start in a snapshot; hashing it takes 0.1 ms."""

MAX_TREE_BYTES = 256 << 10
"""Maximum size of the own prefixes, and of one peer's: 1000 prompts, and a stall of 10 ms for each
snapshot.
"""

MAX_SNAPSHOT_BYTES = MAX_TREE_BYTES
_MAX_PEERS = 64
_MAX_NEWS_BYTES = 1 << 20


def units_of(prompt: bytes, key: bytes) -> bytes:
    """Return one unit for each whole block of ``prompt``, up to ``MAX_PROMPT_BYTES``.

    Equal units at a place mean equal prompts up to that place.
    """
    units = []
    unit = b""
    end = min(len(prompt), MAX_PROMPT_BYTES)
    for start in range(0, end - BLOCK_BYTES + 1, BLOCK_BYTES):
        block = unit + prompt[start : start + BLOCK_BYTES]
        unit = blake2b(block, digest_size=UNIT_BYTES, key=key).digest()
        units.append(unit)
    return b"".join(units)


class PeerPrefixes:
    """Prefixes that one balancer sends to its peers, and those received. Bounded in memory."""

    def __init__(self, secret: str) -> None:
        """Create empty trees; ``secret`` is the key that the balancers share."""
        self._key = blake2b(secret.encode(), digest_size=32).digest()
        self._told = make_tree(UNIT_BYTES, MAX_TREE_BYTES, MAX_TREE_BYTES)
        self._theirs = make_tree(UNIT_BYTES, MAX_TREE_BYTES, _MAX_PEERS * MAX_TREE_BYTES)
        self._news: deque[tuple[bytes, ReplicaId]] = deque()
        self._news_bytes = 0

    def sent(self, request: Request, replica: ReplicaId) -> None:
        """Record that a request has been sent to a replica of this region."""
        if request.allowed_regions is not None or len(request.prompt) < BLOCK_BYTES:
            return
        start = request.prompt[:MAX_PROMPT_BYTES]
        self._news.append((start, replica))
        self._news_bytes += len(start)
        while self._news_bytes > _MAX_NEWS_BYTES:
            self._news_bytes -= len(self._news.popleft()[0])

    def forget(self, target: ReplicaId) -> None:
        """Forget the prefixes of a replica or peer that has left, or has lost its cache."""
        self._told.forget(target)
        self._theirs.forget(target)
        kept = [one for one in self._news if one[1] != target]
        self._news = deque(kept)
        self._news_bytes = sum(len(start) for start, _ in kept)

    def snapshot(self) -> bytes:
        """Return a snapshot of the own prefixes, at most ``MAX_SNAPSHOT_BYTES``."""
        while self._news:
            start, replica = self._news.popleft()
            self._told.add(units_of(start, self._key), replica)
        self._news_bytes = 0
        return prefixes_snapshot.encode(self._told.dump(), UNIT_BYTES, MAX_SNAPSHOT_BYTES)

    def take(self, peer: ReplicaId, data: bytes) -> int:
        """Replace the prefixes of ``peer`` by those of a snapshot.

        Returns:
            Number of prefixes in the snapshot.

        Raises:
            ProtocolError: The data is no snapshot, or is too large; the former prefixes stay.
        """
        if len(data) > 2 * MAX_SNAPSHOT_BYTES:
            raise ProtocolError(f"a prefix snapshot of {len(data)} bytes")
        entries = prefixes_snapshot.decode(data, UNIT_BYTES)
        self._theirs.forget(peer)
        return prefixes_snapshot.load(self._theirs, entries, lambda _: peer)

    def hits(self, request: Request) -> dict[ReplicaId, int]:
        """Return how many of the prompt's tokens each peer's replicas got before."""
        if not self._theirs.num_nodes or not request.prompt:
            return {}
        matched = self._theirs.match(units_of(request.prompt, self._key))
        tokens_a_unit = request.num_tokens * BLOCK_BYTES / len(request.prompt)
        return {peer: int(units * tokens_a_unit) for peer, units in matched.items()}


@runtime_checkable
class SharesPrefixes(Protocol):
    """Interface of a replica policy that declares ``Need.PEER_PREFIXES``."""

    def share_prefixes(self, prefixes: PeerPrefixes) -> None:
        """Set the prefixes that are shared with peers; called once, before any request."""
        ...
