"""Consistent hash ring: each target owns many points; a key belongs to the next point's target."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from hashlib import blake2b

from banaserve_route.policies.interface import ReplicaId, Request

MIN_ENTRIES = 1024
"""Minimum number of points of all targets together, Envoy's smallest ring."""

PREFIX_UNITS = 256
"""Number of leading units of a prompt that identify a session without a name, as in GORGO."""


def hash_of(data: bytes) -> int:
    """Return a 64-bit hash that is the same in every process."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def session_key(request: Request, unit_bytes: int) -> bytes:
    """Return the common key of a session's requests: its name, else the prompt's start."""
    if request.session:
        return request.session.encode()
    return request.prompt[: PREFIX_UNITS * unit_bytes]


class Ring:
    """The ring of one set of targets; ``over`` rebuilds it for another set.

    If a target joins or leaves, only the keys that it gains or loses move.
    """

    def __init__(self, virtual_nodes: int) -> None:
        """Create an empty ring.

        Args:
            virtual_nodes: Number of points of each target; more if ``MIN_ENTRIES`` requires it.
        """
        self._virtual_nodes = virtual_nodes
        self._targets: tuple[ReplicaId, ...] = ()
        self._points: list[int] = []
        self._owners: list[ReplicaId] = []

    def over(self, targets: Sequence[ReplicaId]) -> Ring:
        """Return this ring, rebuilt if it is not that of ``targets``."""
        wanted = tuple(targets)
        if wanted != self._targets:
            each = max(self._virtual_nodes, -(-MIN_ENTRIES // max(1, len(wanted))))
            entries = sorted(
                (hash_of(f"{target}_{number}".encode()), target)
                for target in wanted
                for number in range(each)
            )
            self._points = [point for point, _ in entries]
            self._owners = [target for _, target in entries]
            self._targets = wanted
        return self

    def find(self, key: bytes, among: Container[ReplicaId]) -> ReplicaId | None:
        """Return the first target at or after ``key`` that is in ``among``, or None."""
        start = bisect_left(self._points, hash_of(key))
        tried: set[ReplicaId] = set()
        for place in range(len(self._owners)):
            owner = self._owners[(start + place) % len(self._owners)]
            if owner in tried:
                continue
            if owner in among:
                return owner
            tried.add(owner)
            if len(tried) == len(self._targets):
                break
        return None
