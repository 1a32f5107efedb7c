"""Every private vLLM name that live migration relies on, in one file; see ``compat``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

__all__ = [
    "add_utility",
    "adopt_kv_layout",
    "end_alone",
    "gpu_model_runner",
    "grow_pool",
    "hold_blocks",
    "initialize_model",
    "pipeline_stage",
    "pool_usage",
    "process_weights_after_loading",
    "release_blocks",
    "restart_requests",
    "shrink_pool",
    "split_batch",
    "start_alone",
]

# ---- guests: layers without an engine


class _MiddleStage:
    """A pipeline group in which this process is neither first nor last."""

    rank_in_group = 1
    world_size = 3
    is_first_rank = False
    is_last_rank = False


@contextlib.contextmanager
def pipeline_stage(start: int, end: int) -> Iterator[None]:
    """Models built inside hold decoder layers ``start`` to ``end - 1`` and nothing else.

    ``make_layers`` imports both names when it is called, and the models' loaders skip what a
    pipeline stage lacks.
    """
    import vllm.distributed.parallel_state as parallel_state
    import vllm.distributed.utils as distributed_utils

    with (
        mock.patch.object(distributed_utils, "get_pp_indices", return_value=(start, end)),
        mock.patch.object(parallel_state, "_PP", _MiddleStage()),
    ):
        yield


def start_alone(rendezvous: str) -> None:
    """Make the process groups that vLLM's layers expect, with this process alone in each.

    Args:
        rendezvous: Path of a file that does not exist yet.
    """
    from vllm.distributed import parallel_state

    parallel_state.init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1)


def end_alone() -> None:
    """Undo ``start_alone``."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def gpu_model_runner(config: VllmConfig) -> type[Any]:
    """The class of an engine's model runner on a GPU."""
    if config.use_v2_model_runner:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondModelRunner

        return SecondModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner


def adopt_kv_layout(config: VllmConfig, layout: str, block_size: int) -> None:
    """What an engine core has resolved after its configuration was made.

    Raises:
        ValueError: Another layout was adopted before.
    """
    from vllm.v1.attention.backends.utils import record_kv_cache_layout

    config.cache_config.block_size = block_size
    record_kv_cache_layout(config.cache_config, layout)


# ---- a step in parts


def split_batch(
    common: CommonAttentionMetadata, sizes: Sequence[int]
) -> list[CommonAttentionMetadata]:
    """A batch cut between its tokens; a request that is cut goes on in the next part.

    Args:
        sizes: Tokens of each part; together those of the batch.
    """
    starts = common.query_start_loc_cpu.numpy()
    slices = []
    begin = 0
    for size in sizes:
        end = begin + size
        first = int(np.searchsorted(starts, begin, side="right")) - 1
        behind = int(np.searchsorted(starts, end, side="left"))
        slices.append(UBatchSlice(slice(first, behind), slice(begin, end)))
        begin = end
    return split_attn_metadata(slices, common)


# ---- the scheduler's pool of KV blocks


def grow_pool(scheduler: Any, num_blocks: int) -> None:
    """Add free blocks at the end of the pool until it has ``num_blocks``."""
    pool = scheduler.kv_cache_manager.block_pool
    new = [KVCacheBlock(i, pool=pool) for i in range(pool.num_gpu_blocks, num_blocks)]
    pool.blocks.extend(new)
    pool.free_block_queue.append_n(new)
    _record_pool_size(scheduler, num_blocks)


_HELD = "banaserve_held_from"
"""On a block pool: blocks from this one on are held."""


def hold_blocks(scheduler: Any, first: int) -> None:
    """Give no block from ``first`` on to anybody any more; those in use go on until they are free.

    Each gets one reference more, and no prompt finds it in the prefix cache.
    """
    pool = scheduler.kv_cache_manager.block_pool
    release_blocks(scheduler)
    for block in pool.blocks[first:]:
        pool._maybe_evict_cached_block(block)
    pool.touch(pool.blocks[first:])
    setattr(pool, _HELD, first)


def release_blocks(scheduler: Any) -> None:
    """Undo ``hold_blocks``."""
    pool = scheduler.kv_cache_manager.block_pool
    first = getattr(pool, _HELD, None)
    if first is not None:
        pool.free_blocks(pool.blocks[first:])
        setattr(pool, _HELD, None)


def shrink_pool(scheduler: Any, num_blocks: int) -> list[int]:
    """Take blocks off the end of the pool until it has ``num_blocks``.

    Returns:
        Ids of blocks that are in use and in the way; where there are any, nothing was taken.
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


def _record_pool_size(scheduler: Any, num_blocks: int) -> None:
    scheduler.kv_cache_manager.block_pool.num_gpu_blocks = num_blocks
    scheduler.cache_config.num_gpu_blocks = num_blocks
    scheduler.kv_cache_config.num_blocks = num_blocks


def pool_usage(scheduler: Any) -> tuple[int, int]:
    """Blocks in the pool, and how many of them are free."""
    pool = scheduler.kv_cache_manager.block_pool
    return pool.num_gpu_blocks, pool.get_num_free_blocks()


def restart_requests(scheduler: Any) -> int:
    """Preempt every running request, drop what is in flight of it, and forget all cached KV.

    As ``Scheduler.reset_prefix_cache(reset_running_requests=True)``, which refuses where blocks
    wait for a step in flight. Nothing writes to KV behind the engine's back, so they need not.

    Returns:
        How many were running.
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


def add_utility(name: str, utility: Callable[..., Any]) -> None:
    """Let engine cores of this process answer ``call_utility(name)``; it gets the core first."""
    setattr(EngineCore, name, utility)
