"""Front door's client of the store: lookups of prompts before routing, and ends of holds."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from banaserve.base.clock import WallClock
from banaserve.base.types import Role
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat import kv_cache
from banaserve.engine.compat.config import VllmConfig
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.wire import MAX_KEYS
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.instances.generations import candidates

_ASKED_S = 0.02
"""Maximum wait for the answers of other machines' stores, in seconds.

A round trip takes a millisecond, and fetched blocks save more time than this limit. A store that is
away is not asked.
"""
_POLL_S = 0.001
_TELL_S = 0.2
"""Time over which ends of holds are collected for one message to the store, in seconds.

Most holds have been ended by their decode legs before.
"""
_HOLD_BITS = 62
_KNOWN = (Lookup.HIT, Lookup.PENDING)


class PromptHold(NamedTuple):
    """Hold of a prompt's blocks in stores, from the prefill leg on until decode has read them.

    Attributes:
        number: Number of the hold; 0 without a store.
        stores: ``HOST:PORT`` of each store; an empty string stands for the front door's store.
    """

    number: int
    stores: tuple[str, ...]


class HoldEnd(NamedTuple):
    """End of a hold.

    Attributes:
        reader: Index of the decode leg that no longer reads the blocks; None for all legs.
        store: ``HOST:PORT`` of a peer of the front door's store that is told, too; empty for none.
    """

    hold: int
    reader: int | None = None
    store: str = ""


class PrefixLookup:
    """Lookup of prompts in the store, with the engines' hashes of blocks. Its methods block."""

    def __init__(self, config: VllmConfig, fingerprint: Fingerprint, socket_path: str) -> None:
        self._block_size = fingerprint.block_size_tokens
        self._hasher = kv_cache.block_hasher(config, self._block_size)
        self._client = StoreClient(
            socket_path, fingerprint, client_name="front-door", maps_pool=False
        )

    def cached_tokens(self, request: compat.EngineCoreRequest) -> int:
        """Return the length in tokens of the longest prefix that is stored or being stored.

        Only whole blocks count.
        """
        keys = kv_cache.Request.from_engine_core_request(request, self._hasher).block_hashes
        if not keys:
            return 0
        known = num_known(lambda: self._client.lookup(keys[:MAX_KEYS]), WallClock().now, time.sleep)
        return known * self._block_size

    def end_holds(self, holds: Sequence[HoldEnd]) -> None:
        """End holds: the store may evict their blocks again."""
        # Reconnects to a restarted store: it has the holds that engines have told it since.
        self._client.lookup(())
        for hold in holds:
            self._client.end_hold(*hold)

    def close(self) -> None:
        self._client.close()


def num_known(
    look: Callable[[], Sequence[Lookup]], now: Callable[[], float], sleep: Callable[[float], object]
) -> int:
    """Return the number of blocks of the longest prefix that is stored or being stored.

    Stores of other machines count, too.

    Args:
        look: Function that looks up all blocks in the store, in order.
        now: Clock, in seconds.
        sleep: Function that sleeps for seconds of the same clock.
    """
    until_s = now() + _ASKED_S
    while True:
        states = look()
        known = sum(1 for _ in takewhile(lambda state: state in _KNOWN, states))
        hoped = sum(1 for _ in takewhile(lambda state: state is not Lookup.MISS, states))
        if known == hoped or now() >= until_s:
            return known
        sleep(_POLL_S)


class PrefixLookups:
    """Lookups in the store, one for each generation of weights, and ends of holds.

    Attributes:
        by_weights: Lookup by identity of the weights; empty without a store.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.by_weights: dict[str, PrefixLookup] = {}
        self._cluster = cluster
        self._ended: list[HoldEnd] = []
        self._telling: asyncio.Task[None] | None = None

    def hold(self, earlier: PromptHold | None, *stores: str) -> PromptHold:
        """Return a hold of a prompt in place of an earlier one, which ends.

        The caller must call ``end_hold`` at the end of the request, whatever its outcome.
        """
        self.end_hold(earlier)
        return PromptHold(1 + secrets.randbits(_HOLD_BITS) if self.by_weights else 0, stores)

    def end_hold(self, hold: PromptHold | None, reader: int | None = None) -> None:
        """End the hold of a request that has ended or is retried; the stores are told soon.

        Args:
            reader: Index of the request's sequence that has ended; None if all have.
        """
        if hold is not None and hold.number:
            self._ended += [HoldEnd(hold.number, reader, one) for one in sorted({*hold.stores})]
            if self._telling is None or self._telling.done():
                self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def told(self) -> None:
        """Return when the stores know of all holds that have ended by now."""
        for _ in range(2):  # of the holds that are being told, and of those that ended since
            if self._telling is not None:
                await asyncio.wait({self._telling})

    async def _tell(self) -> None:
        await asyncio.sleep(_TELL_S)
        ended, self._ended = self._ended, []
        # All lookups are clients of the same store, so any of them will do.
        lookup = next(iter(self.by_weights.values()), None)
        if lookup is not None:
            await asyncio.to_thread(lookup.end_holds, ended)
        if self._ended:
            self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def cached_tokens(self, request: compat.EngineCoreRequest) -> int:
        """Return the number of prompt tokens that the store has; 0 without a store.

        Also 0 while all instances do both legs: then each request has one leg, whatever the store
        has, and need not wait for the store's answer.
        """
        if not self.by_weights or request.prompt_token_ids is None:
            return 0
        if all(one.role is Role.COLOCATED for one in self._cluster.instances.values()):
            return 0
        if (lookup := self._of_new_requests()) is None:
            return 0
        return await asyncio.to_thread(lookup.cached_tokens, request)

    def _of_new_requests(self) -> PrefixLookup | None:
        """Return the lookup for the generation that new requests are routed to; None if unknown."""
        if len(self.by_weights) == 1:
            return next(iter(self.by_weights.values()))
        instances = self._cluster.instances
        chosen = candidates(instances.values())
        return next((self.by_weights.get(instances[name].weights) for name in chosen), None)

    def keep_only(self, weights: str) -> None:
        """Close the lookups of all other weights."""
        for other in set(self.by_weights) - {weights}:
            self.by_weights.pop(other).close()

    def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
        for lookup in self.by_weights.values():
            lookup.close()
