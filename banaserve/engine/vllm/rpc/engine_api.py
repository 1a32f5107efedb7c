"""Contract of the front door with engine cores and workers, without what migration adds.

Methods run between two engine steps. See ``migration.worker_api`` for migration.
"""

from __future__ import annotations

import msgspec

from banaserve.config import Budget
from banaserve.engine.vllm.tracing.events import EngineAnswer
from banaserve.kvstore.fingerprint import Fingerprint


class PoolStatus(msgspec.Struct, frozen=True):
    """Counts of a scheduler's pool of KV blocks and of its requests.

    Attributes:
        num_blocks: In the pool at present.
        free_blocks: Of them, that no request holds.
        running: Requests.
        waiting: Requests.
        preemptions: Of all requests that have not ended, each as often as it was preempted.
    """

    num_blocks: int
    free_blocks: int
    running: int
    waiting: int
    preemptions: int


class PoolResize(msgspec.Struct, frozen=True):
    """Outcome of a change of a pool's size.

    Attributes:
        pool: After it.
        busy: Blocks in use that stand in the way of shrinking. Where there are any, the size has
            not changed: ask again later.
    """

    pool: PoolStatus
    busy: int


class CoreApi:
    """Methods that banaserve adds to vLLM's engine core, called by ``call_utility``."""

    def banaserve_pool_info(self) -> PoolStatus:
        """Counts of the pool of an engine that can migrate."""
        raise NotImplementedError

    def banaserve_resize_pool(self, num_blocks: int, hold: bool = False) -> PoolResize:
        """Grow or shrink the pool to ``num_blocks``; a block in use is never taken away.

        Grow to ``KvStatus.num_blocks + KvStatus.blocks_gained`` after a move is freed. Before a
        unit moves home, shrink until no block is in the way.

        Args:
            num_blocks: At least 2.
            hold: Where blocks in use are in the way, give none of those that are to go to any
                request until the next call: under load they would never be free all at once.
        """
        raise NotImplementedError

    def banaserve_notes(self, names: list[str]) -> EngineAnswer | None:
        """What became of the requests that the engine calls ``names``; None without a store.

        Those of a name are empty where it does not know them, or not any more.
        """
        raise NotImplementedError

    def banaserve_set_budget(self, num_tokens: int, num_requests: int) -> Budget:
        """Compute at most so many tokens a step, of so many requests, from the next step on.

        Returns:
            The budget as it is now: what the runner has no buffers for is cut.
        """
        raise NotImplementedError


class WorkerApi:
    """Methods that banaserve adds to vLLM's worker, called by ``collective_rpc``."""

    def banaserve_fingerprint(self) -> Fingerprint | None:
        """Identity of the worker's KV blocks; None without a store."""
        raise NotImplementedError
