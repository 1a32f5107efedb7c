"""How much of a prompt the store holds already: for routing, before any engine sees it."""

from __future__ import annotations

import asyncio

from vllm.config import VllmConfig

from banaserve.engine.vllm import compat
from banaserve.kvstore.client import StoreClient
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.interface import Lookup
from banaserve.kvstore.wire import MAX_KEYS


class PrefixLookup:
    """Hashes prompts as the engines do and asks the store; off the event loop."""

    def __init__(self, config: VllmConfig, fingerprint: Fingerprint, socket_path: str) -> None:
        self._block_size = fingerprint.block_size_tokens
        self._hasher = compat.block_hasher(config, self._block_size)
        self._client = StoreClient(
            socket_path, fingerprint, client_name="front-door", maps_pool=False
        )

    async def cached_tokens(self, request: compat.EngineCoreRequest) -> int:
        """Tokens of the longest prefix in whole blocks that is stored or being stored."""
        return await asyncio.to_thread(self._cached_tokens, request)

    def _cached_tokens(self, request: compat.EngineCoreRequest) -> int:
        keys = compat.Request.from_engine_core_request(request, self._hasher).block_hashes
        if not keys:
            return 0
        states = self._client.lookup(keys[:MAX_KEYS])
        num_known = next((i for i, state in enumerate(states) if state is Lookup.MISS), len(states))
        return num_known * self._block_size

    def close(self) -> None:
        self._client.close()
