"""vLLM's schedulers: their queues, their pool of KV blocks and the outputs of their steps."""

from __future__ import annotations

import functools
import time
from itertools import chain
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

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
    """Make schedulers of this process serve models that keep states, with the store's connector.

    Steps end where the connector says, so that states can be saved there. A request of which a
    block could not be fetched is computed again from its first token: vLLM would end the engine,
    since it does not distinguish the blocks of several groups. All groups share one pool, so block
    ids are unique.

    With vLLM's second model runner such a request of any model is preempted: that runner goes on at
    its own position on the GPU, whatever number of computed tokens the scheduler goes back to.
    """
    begin, lose = Scheduler.__init__, Scheduler._handle_invalid_blocks

    @functools.wraps(begin)
    def begin_with_states(scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
        begin(scheduler, *args, **kwargs)
        if _keeps_states(scheduler):
            scheduler.need_mamba_block_aligned_split = True
            scheduler._mamba_block_aligned_split = functools.partial(  # type: ignore[method-assign]
                _chunk, scheduler
            )

    @functools.wraps(lose)
    def start_over(scheduler: Scheduler, invalid: set[int], scheduled: dict[str, int]) -> set[str]:
        lost: set[str] = (
            _start_over(scheduler, invalid)
            if _keeps_states(scheduler)
            else lose(scheduler, invalid, scheduled)
        )
        if scheduler.use_v2_model_runner and scheduler.recompute_kv_load_failures:
            _preempt(scheduler, lost)
        return lost

    Scheduler.__init__ = begin_with_states  # type: ignore[method-assign, assignment]
    Scheduler._handle_invalid_blocks = start_over  # type: ignore[method-assign, assignment]


def _keeps_states(scheduler: Scheduler) -> bool:
    return bool(getattr(scheduler.connector, "keeps_states", False))


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


def _start_over(scheduler: Scheduler, invalid: set[int]) -> set[str]:
    manager = scheduler.kv_cache_manager
    lost = set()
    for request in scheduler.running:
        blocks = chain.from_iterable(manager.get_block_ids(request.request_id))
        if not invalid.isdisjoint(blocks):
            request.num_computed_tokens = 0
            lost.add(request.request_id)
    return lost


def _preempt(scheduler: Scheduler, request_ids: set[str]) -> None:
    """Preempt running requests; forget their blocks, some of which hold garbage."""
    manager, now_s = scheduler.kv_cache_manager, time.monotonic()
    for request in [one for one in scheduler.running[::-1] if one.request_id in request_ids]:
        manager.evict_blocks({*chain.from_iterable(manager.get_block_ids(request.request_id))})
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now_s, drop_stale_output=True)


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
    now_s = time.monotonic()
    while scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), now_s, drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.clear()
    pool = scheduler.kv_cache_manager.block_pool
    while scheduler.deferred_frees:
        _, blocks = scheduler.deferred_frees.popleft()
        pool.free_blocks(blocks)
    pool.evict_blocks({block.block_id for block in pool.blocks})
    return num_running
