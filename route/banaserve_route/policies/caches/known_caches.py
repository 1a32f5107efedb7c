"""Caches of all replicas that publish events, and how far the events are trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from banaserve._native import Line
from banaserve_route.policies.caches.cache_view import CacheView
from banaserve_route.policies.interface import Flight, KnownHit, ReplicaId, Request

_LEARNING = 0.1
_DISTRUSTED_BELOW, _TRUSTED_ABOVE = 0.5, 0.8
_NUM_TIMES = 20
"""Number of prompts without a cached block after which times to first token are judged."""
_LONG_FRACTION = 0.75
"""Share of a prompt from which a claimed hit must show in the time to first token."""

_MAX_ADAPTERS, _MAX_NAME_CHARS = 4096, 256


class CacheState(StrEnum):
    """Kind of knowledge of a replica's cache."""

    EXACT = "exact"
    """All held blocks are known."""
    ESTIMATED = "estimated"
    """Some may be unknown: the policy's prefix tree is used, and known blocks count at least."""
    DISTRUSTED = "distrusted"
    """Answers show other hits than the events do: the policy's prefix tree is used alone."""


class Trust:
    """Agreement of a replica's events with its answers.

    Attributes:
        agreement: Smoothed agreement in [0, 1]; 1 at first.
        is_trusted: True unless the agreement has become low and not high again since.
    """

    def __init__(self) -> None:
        self.agreement, self.is_trusted = 1.0, True

    def learn(self, sample: float) -> None:
        """Take in the agreement of one answer, in [0, 1]."""
        self.agreement += _LEARNING * (sample - self.agreement)
        limit = _DISTRUSTED_BELOW if self.is_trusted else _TRUSTED_ABOVE
        self.is_trusted = self.agreement >= limit


class _Replica:
    """Views of a replica's engines, and the blocks that requests under way bring to it."""

    def __init__(self, num_ranks: int) -> None:
        self.views = [CacheView() for _ in range(num_ranks)]
        self.coming: Counter[bytes] = Counter()
        self.trust = Trust()

    @property
    def is_whole(self) -> bool:
        return all(view.is_whole for view in self.views)

    @property
    def block_size(self) -> int:
        return max(view.block_size for view in self.views)

    def hit(self, request: Request) -> KnownHit | None:
        """Return the hit by the events; None if the prompt's blocks are not known here."""
        keys = request.blocks.get(self.block_size)
        if keys is None:
            return None
        # The engine's own front end chooses the rank, and not by its cache: the hit is their mean.
        blocks = sum(view.num_held(keys, self.coming) for view in self.views)
        tokens = blocks * self.block_size // len(self.views)
        return KnownHit(tokens, self.is_whole)


class _Sent(NamedTuple):
    replica: _Replica
    keys: Sequence[bytes]
    hit: KnownHit


class KnownCaches:
    """Caches of the replicas that publish events.

    Blocks of requests that are on their way to a replica count as held there: they are, before a
    later request can be computed. Engines hold them at least until the request ends.

    Attributes:
        adapters: Names of LoRA adapters with blocks in a cache.
        counts: Counts of batches, replays and faults, by their name in the metrics.
    """

    def __init__(self) -> None:
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._sent: dict[int, _Sent] = {}
        self._times, self._num_times = Line(0.05, 1000.0), 0
        self.adapters: set[str] = set()
        self.counts: Counter[str] = Counter()

    def add(self, replica: ReplicaId, num_ranks: int) -> list[CacheView]:
        """Add a replica; return the views of its engines, of which nothing is known yet."""
        self._replicas[replica] = added = _Replica(num_ranks)
        return added.views

    def remove(self, replica: ReplicaId) -> None:
        """Remove a replica that has left or publishes no more; unknown ones are ignored."""
        self._replicas.pop(replica, None)

    def learn_adapter(self, name: str) -> None:
        """Record an adapter's name; those beyond the first few thousand are left out."""
        if len(self.adapters) < _MAX_ADAPTERS and len(name) <= _MAX_NAME_CHARS:
            self.adapters.add(name)

    @property
    def block_sizes(self) -> set[int]:
        """Return the sizes of blocks in use, in tokens; empty before the first event."""
        if not self._replicas:
            return set()
        return {one.block_size for one in self._replicas.values()} - {0}

    def hits(self, request: Request) -> dict[ReplicaId, KnownHit]:
        """Return the known hit at each replica whose events are trusted, zeros included."""
        hits = {
            name: hit
            for name, one in self._replicas.items()
            if one.trust.is_trusted and (hit := one.hit(request)) is not None
        }
        return {
            name: KnownHit(min(hit.tokens, request.num_tokens), hit.is_exact)
            for name, hit in hits.items()
        }

    def sent(self, flight: Flight) -> None:
        """Count the blocks of a request as coming to its target."""
        replica = self._replicas.get(flight.target)
        if replica is None or (hit := replica.hit(flight.request)) is None:
            return
        keys = flight.request.blocks[replica.block_size]
        replica.coming.update(keys)
        self._sent[id(flight)] = _Sent(replica, keys, hit)

    def ended(self, flight: Flight, is_answered: bool) -> None:
        """Count the blocks no more, and compare an answer with what the events promised."""
        if (sent := self._sent.pop(id(flight), None)) is None:
            return
        coming = sent.replica.coming
        for key in sent.keys:
            coming[key] -= 1
            if not coming[key]:
                del coming[key]
        sample = self._agreement(flight, sent.hit) if is_answered else None
        if sample is not None:
            sent.replica.trust.learn(sample)

    def states(self) -> Counter[CacheState]:
        """Return the number of replicas in each state."""
        return Counter(map(_state, self._replicas.values()))

    def state(self, replica: ReplicaId) -> CacheState | None:
        """Return the state of a replica; None if it publishes no events."""
        known = self._replicas.get(replica)
        return None if known is None else _state(known)

    def _agreement(self, flight: Flight, hit: KnownHit) -> float | None:
        """Return the agreement of an answer with the hit in [0, 1]; None if it shows nothing."""
        cached = flight.cached_tokens
        if cached is None:
            return self._agreement_by_time(flight, hit)
        if cached == hit.tokens or (cached > hit.tokens and not hit.is_exact):
            return 1.0 if cached else None
        return min(cached, hit.tokens) / max(cached, hit.tokens)

    def _agreement_by_time(self, flight: Flight, hit: KnownHit) -> float | None:
        """Return the claimed share of a prompt that was not computed, by the time that it took.

        Only requests to an idle replica are compared, and the time of a token is learnt from
        prompts without a cached block, at all replicas.
        """
        if flight.outstanding or flight.first_token_s is None:
            return None
        tokens = flight.request.num_tokens
        taken_ms = 1000 * (flight.first_token_s - flight.sent_s) - flight.round_trip_ms
        if not hit.tokens:
            if hit.is_exact:
                self._times.learn(tokens, taken_ms)
                self._num_times += 1
            return None
        times = self._times
        is_long = hit.tokens >= _LONG_FRACTION * tokens and times.slope * hit.tokens > times.base
        if self._num_times < _NUM_TIMES or not is_long:
            return None
        num_computed = (taken_ms - times.base) / times.slope
        return min(1.0, max(0.0, (tokens - num_computed) / hit.tokens))


def _state(replica: _Replica) -> CacheState:
    if not replica.trust.is_trusted:
        return CacheState.DISTRUSTED
    return CacheState.EXACT if replica.is_whole else CacheState.ESTIMATED
