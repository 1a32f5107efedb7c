"""Contract of the front door with engine cores and workers, without the methods of migration.

Methods run between two engine steps. See ``migration.worker_api`` for migration.
"""

from __future__ import annotations

import msgspec

from banaserve.base.config.serve_config import Budget
from banaserve.contracts.trace_events import EngineAnswer
from banaserve.kvstore.fingerprint import Fingerprint


class PoolStatus(msgspec.Struct, frozen=True):
    """Counts of a scheduler's pool of KV blocks and of its requests.

    Attributes:
        free_blocks: Number of blocks in the pool that no request holds.
        running: Number of running requests.
        waiting: Number of waiting requests.
        preemptions: Number of preemptions of all requests that have not ended.
    """

    num_blocks: int
    free_blocks: int
    running: int
    waiting: int
    preemptions: int


class PoolResize(msgspec.Struct, frozen=True):
    """Outcome of a change of a pool's size.

    Attributes:
        pool: Status of the pool after the change.
        busy: Number of blocks in use that prevent shrinking. If it is not 0, the size has not
            changed: ask again later.
    """

    pool: PoolStatus
    busy: int


class CoreApi:
    """Methods that banaserve adds to vLLM's engine core, called by ``call_utility``."""

    def banaserve_pool_info(self) -> PoolStatus:
        """Return the counts of the pool of an engine that can migrate."""
        raise NotImplementedError

    def banaserve_resize_pool(self, num_blocks: int, hold: bool = False) -> PoolResize:
        """Grow or shrink the pool to ``num_blocks``; a block in use is never taken away.

        Grow to ``KvStatus.num_blocks + KvStatus.blocks_gained`` after a move is freed. Before a
        unit moves home, shrink until no block prevents it.

        Args:
            num_blocks: New number of blocks, at least 2.
            hold: True to give none of the blocks that are to be removed to any request until the
                next call, if blocks in use prevent shrinking: under load they would never all be
                free at the same time.
        """
        raise NotImplementedError

    def banaserve_notes(self, names: list[str]) -> EngineAnswer | None:
        """Return the notes of the requests that the engine calls ``names``; None without a store.

        The list of a request that the engine does not know, or not any more, is empty.
        """
        raise NotImplementedError

    def banaserve_set_budget(self, num_tokens: int, num_requests: int) -> Budget:
        """Limit tokens and requests of a step, from the next step on.

        Returns:
            The budget now in force, reduced to the size of the runner's buffers.
        """
        raise NotImplementedError


class WorkerApi:
    """Methods that banaserve adds to vLLM's worker, called by ``collective_rpc``."""

    def banaserve_fingerprint(self) -> Fingerprint | None:
        """Return the fingerprint of the worker's KV blocks; None without a store."""
        raise NotImplementedError

    def banaserve_describe_adapter(self, path: str) -> str:
        """Return the digest of a LoRA adapter's files on the worker's machine."""
        raise NotImplementedError
