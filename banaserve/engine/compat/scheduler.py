"""vLLM's schedulers: their queues, their pool of KV blocks and the outputs of their steps."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from itertools import chain
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from banaserve.base.errors import UserError

__all__ = [
    "AsyncScheduler",
    "ModelRunnerOutput",
    "Request",
    "RequestQueue",
    "Scheduler",
    "SchedulerOutput",
]


def check_first_come(vllm_config: Any) -> None:
    """Check that the engine does not order requests by priority.

    Raises:
        UserError: The engine schedules by priority.
    """
    if vllm_config.scheduler_config.policy == SchedulingPolicy.PRIORITY.value:
        raise UserError(
            "--scheduling-policy priority and the preble scheduler exclude each other: "
            "leave one of them out"
        )


def install_states() -> None:
    """Make steps of this process's schedulers end where the store's connector says.

    Models that keep states have their states saved there.
    """
    begin = Scheduler.__init__

    @functools.wraps(begin)
    def begin_with_states(scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
        begin(scheduler, *args, **kwargs)
        if getattr(scheduler.connector, "keeps_states", False):
            scheduler.need_mamba_block_aligned_split = True
            scheduler._mamba_block_aligned_split = functools.partial(  # type: ignore[method-assign]
                _chunk, scheduler
            )

    Scheduler.__init__ = begin_with_states  # type: ignore[method-assign, assignment]


def install_losses() -> None:
    """Make schedulers of this process compute requests again of which a block was not fetched.

    vLLM 0.32 lets tokens count that a later step, already under way, computes from such blocks; it
    leaves the blocks of requests that end meanwhile in its prefix cache; and it ends an engine with
    several groups of blocks, whose ids it takes to be unique only within a group.
    """
    Scheduler._handle_invalid_blocks = _start_over  # type: ignore[method-assign, assignment]


def _chunk(
    scheduler: Scheduler,
    request: Request,
    num_tokens: int,
    num_local: int = 0,
    num_external: int = 0,
) -> int:
    start = request.num_computed_tokens + num_local + num_external
    prompt_end = max(request.num_prompt_tokens, request.num_tokens - 1)
    connector: Any = scheduler.connector
    num: int = connector.chunk(start, num_tokens, prompt_end)
    return num


def _start_over(scheduler: Scheduler, invalid: set[int], scheduled: dict[str, int]) -> set[str]:
    """Preempt requests that hold an invalid block, and drop their output in flight.

    Returns:
        No request: the output of these counts as stale, whichever step it is of.
    """
    manager = scheduler.kv_cache_manager
    lost = [
        request
        for request in scheduler.running
        if not invalid.isdisjoint(chain.from_iterable(manager.get_block_ids(request.request_id)))
    ]
    for request in lost:
        request.skip_reading_prefix_cache = True  # a second fetch could fail as the first one did
    _restart(scheduler, lost)
    return set()


def _restart(scheduler: Scheduler, running: Iterable[Request]) -> None:
    """Preempt requests, drop their output in flight, and forget all prefixes in the cache."""
    now_s = time.monotonic()
    for request in reversed(list(running)):
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now_s, drop_stale_output=True)
        # It may run again in the next step, in which it is to count as new.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    # Which blocks requests had that were preempted after the step was planned is not known.
    for request in scheduler.requests.values():
        if request.status is RequestStatus.PREEMPTED:
            request.drop_stale_output = True
    pool = scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks})


def use_waiting_queue(scheduler: Scheduler, queue: RequestQueue) -> None:
    """Make a scheduler that has no request yet take its waiting requests from ``queue``.

    Waiting requests that hold KV blocks have a separate queue, which is served first.
    """
    assert not scheduler.waiting
    scheduler.waiting = queue


def cached_tokens(scheduler: Scheduler, request: Request) -> int:
    """Return the number of leading tokens of ``request`` in the prefix cache; changes nothing."""
    manager = scheduler.kv_cache_manager
    if not manager.prefix_cache_lookup_enabled(request):
        return 0
    # ``get_computed_blocks`` would emit events at each call.
    found = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
    return int(found[1])


# ---- the pool of KV blocks


def grow_pool(scheduler: Scheduler, num_blocks: int) -> None:
    """Add free blocks at the end of the pool until it has ``num_blocks``."""
    pool = scheduler.kv_cache_manager.block_pool
    new = [KVCacheBlock(i, pool=pool) for i in range(pool.num_gpu_blocks, num_blocks)]
    pool.blocks.extend(new)
    pool.free_block_queue.append_n(new)
    _record_pool_size(scheduler, num_blocks)


_HELD = "banaserve_held_from"
"""Attribute of a block pool: number of the first held block; None for none."""


def hold_blocks(scheduler: Scheduler, first: int) -> None:
    """Give no block from ``first`` on to any request; blocks in use stay so until they are free.

    Each held block gets an additional reference, and no prompt finds it in the prefix cache.
    """
    pool = scheduler.kv_cache_manager.block_pool
    release_blocks(scheduler)
    for block in pool.blocks[first:]:
        pool._maybe_evict_cached_block(block)
    pool.touch(pool.blocks[first:])
    setattr(pool, _HELD, first)


def release_blocks(scheduler: Scheduler) -> None:
    """Undo ``hold_blocks``."""
    pool = scheduler.kv_cache_manager.block_pool
    first = getattr(pool, _HELD, None)
    if first is not None:
        pool.free_blocks(pool.blocks[first:])
        setattr(pool, _HELD, None)


def shrink_pool(scheduler: Scheduler, num_blocks: int) -> list[int]:
    """Take blocks off the end of the pool until it has ``num_blocks``.

    Returns:
        Ids of blocks in use that prevent shrinking; if there are any, no block was taken.
    """
    pool = scheduler.kv_cache_manager.block_pool
    leaving = pool.blocks[num_blocks:]
    busy = [block.block_id for block in leaving if block.ref_cnt > 0]
    if busy:
        return busy
    for block in leaving:
        pool._maybe_evict_cached_block(block)
        pool.free_block_queue.remove(block)
    del pool.blocks[num_blocks:]
    _record_pool_size(scheduler, num_blocks)
    return []


def _record_pool_size(scheduler: Scheduler, num_blocks: int) -> None:
    scheduler.kv_cache_manager.block_pool.num_gpu_blocks = num_blocks
    scheduler.cache_config.num_gpu_blocks = num_blocks
    scheduler.kv_cache_config.num_blocks = num_blocks


def pool_usage(scheduler: Scheduler) -> tuple[int, int]:
    """Return the number of blocks in the pool, and of free ones."""
    pool = scheduler.kv_cache_manager.block_pool
    return pool.num_gpu_blocks, pool.get_num_free_blocks()


def restart_requests(scheduler: Scheduler) -> int:
    """Preempt every running request, drop its output in flight, and forget all cached KV.

    Like ``Scheduler.reset_prefix_cache(reset_running_requests=True)``, which refuses while blocks
    wait for a step in flight. Nothing but the engine writes to KV, so these blocks need not wait.

    Returns:
        Number of requests that were running.
    """
    num_running = len(scheduler.running)
    _restart(scheduler, scheduler.running)
    while scheduler.deferred_frees:
        _, blocks = scheduler.deferred_frees.popleft()
        scheduler.kv_cache_manager.block_pool.free_blocks(blocks)
    return num_running
