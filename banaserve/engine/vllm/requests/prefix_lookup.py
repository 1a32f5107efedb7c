"""Front door's part in the store: lookups of prompts before routing, holds of those handed over."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from banaserve.clock import WallClock
from banaserve.engine.vllm.cluster import Cluster
from banaserve.engine.vllm.compat import engine as compat
from banaserve.engine.vllm.compat import kv_cache
from banaserve.engine.vllm.compat.config import VllmConfig
from banaserve.engine.vllm.generations import candidates
from banaserve.kvstore.client import StoreClient
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.interface import Lookup
from banaserve.kvstore.wire import MAX_KEYS
from banaserve.types import Role

_ASKED_S = 0.02
"""For the answers of other machines' stores: a round trip takes a millisecond, and what is fetched
saves more than this. A store that is away is asked nothing."""
_POLL_S = 0.001
_TELL_S = 0.2
"""Holds that end within so long are told to the store together; decode legs have ended most."""
_HOLD_BITS = 62


class HoldEnd(NamedTuple):
    """End of a hold.

    Attributes:
        reader: Decode leg that reads the blocks no more; None for all of them.
        store: ``HOST:PORT`` of a peer of the front door's store that is told, too; empty for none.
    """

    hold: int
    reader: int | None = None
    store: str = ""


class PrefixLookup:
    """Hashes prompts as the engines do and asks the store; off the event loop."""

    def __init__(self, config: VllmConfig, fingerprint: Fingerprint, socket_path: str) -> None:
        self._block_size = fingerprint.block_size_tokens
        self._hasher = kv_cache.block_hasher(config, self._block_size)
        self._client = StoreClient(
            socket_path, fingerprint, client_name="front-door", maps_pool=False
        )

    async def cached_tokens(self, request: compat.EngineCoreRequest) -> int:
        """Tokens of the longest prefix in whole blocks that is stored or being stored."""
        return await asyncio.to_thread(self._cached_tokens, request)

    def _cached_tokens(self, request: compat.EngineCoreRequest) -> int:
        keys = kv_cache.Request.from_engine_core_request(request, self._hasher).block_hashes
        if not keys:
            return 0
        known = num_known(lambda: self._client.lookup(keys[:MAX_KEYS]), WallClock().now, time.sleep)
        return known * self._block_size

    async def end_holds(self, holds: Sequence[HoldEnd]) -> None:
        """Let the store evict again what is held."""
        await asyncio.to_thread(self._end_holds, holds)

    def _end_holds(self, holds: Sequence[HoldEnd]) -> None:
        # Connects to a store that was started anew: what engines have told it is held there.
        self._client.lookup(())
        for hold in holds:
            self._client.end_hold(*hold)

    def close(self) -> None:
        self._client.close()


def num_known(
    look: Callable[[], Sequence[Lookup]], now: Callable[[], float], sleep: Callable[[float], object]
) -> int:
    """Blocks of the longest prefix that is stored or being stored, here or on other machines.

    Args:
        look: Asks the store for all blocks, in order.
        now: Seconds.
        sleep: Of the same time.
    """
    until_s = now() + _ASKED_S
    states = look()
    while _num_known(states) < _num_hoped(states) and now() < until_s:
        sleep(_POLL_S)
        states = look()
    return _num_known(states)


def _num_known(states: Sequence[Lookup]) -> int:
    """Blocks of the longest prefix that is stored or being stored."""
    known = takewhile(lambda state: state in (Lookup.HIT, Lookup.PENDING), states)
    return sum(1 for _ in known)


def _num_hoped(states: Sequence[Lookup]) -> int:
    """The same where all that stores of other machines are asked about was there."""
    return sum(1 for _ in takewhile(lambda state: state is not Lookup.MISS, states))


class PrefixLookups:
    """The lookup of each generation of weights that instances compute with.

    Attributes:
        by_weights: Empty without a store.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.by_weights: dict[str, PrefixLookup] = {}
        self._cluster = cluster
        self._ended: list[HoldEnd] = []
        self._telling: asyncio.Task[None] | None = None

    def new_hold(self) -> int:
        """Number under which the store is to hold a prompt until decode has read it; 0 without one.

        Whoever takes it calls ``end_hold`` at the end, whatever has become of the request.
        """
        return 1 + secrets.randbits(_HOLD_BITS) if self.by_weights else 0

    def end_hold(self, hold: int, stores: Iterable[str], reader: int | None = None) -> None:
        """The request is over, or tried again; stores are told soon. 0 is no hold.

        Args:
            stores: ``HOST:PORT`` of those that hold the prompt; empty for the front door's.
            reader: Sequence of the request that is over; None where all are.
        """
        if hold:
            self._ended += [HoldEnd(hold, reader, store) for store in sorted({*stores})]
            if self._telling is None or self._telling.done():
                self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        while self._ended:
            await asyncio.sleep(_TELL_S)
            ended, self._ended = self._ended, []
            # All of them are clients of one store.
            lookup = next(iter(self.by_weights.values()), None)
            if lookup is not None:
                await lookup.end_holds(ended)

    async def cached_tokens(self, request: compat.EngineCoreRequest) -> int:
        """What the store holds of the prompt; 0 without a store.

        Also 0 while all instances do both: a request has one leg then, whatever the store holds,
        and need not wait for its answer.
        """
        if not self.by_weights or request.prompt_token_ids is None:
            return 0
        if all(one.role is Role.COLOCATED for one in self._cluster.instances.values()):
            return 0
        lookup = self._of_new_requests()
        return await lookup.cached_tokens(request) if lookup is not None else 0

    def _of_new_requests(self) -> PrefixLookup | None:
        """Of the weights that a new request goes to."""
        if len(self.by_weights) == 1:
            return next(iter(self.by_weights.values()))
        instances = self._cluster.instances
        chosen = candidates(self._cluster.members())
        return next((self.by_weights.get(instances[name].weights) for name in chosen), None)

    def keep_only(self, weights: str) -> None:
        """Close the lookups of other weights."""
        for other in set(self.by_weights) - {weights}:
            self.by_weights.pop(other).close()

    def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
        for lookup in self.by_weights.values():
            lookup.close()
