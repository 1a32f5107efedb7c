"""Random steps of an engine whose sequences are split, and pages as vLLM packs them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from banaserve.migration.kv.dirty_blocks import RemoteBlocks

if not current_platform.is_cpu():
    pytest.skip("pages are those of vLLM on CPU", allow_module_level=True)
current_platform.import_kernels()

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, GROUP, HEAD_SIZE = 24, 32, 2, 3, 64
SCALE = HEAD_SIZE**-0.5
ISA = _get_attn_isa(torch.float32, BLOCK_SIZE, HEAD_SIZE)


def write(key: Any, value: Any, cache: Any, slots: Any) -> None:
    """As vLLM's attention on CPU."""
    pages = cache.view(len(cache), NUM_KV_HEADS, 2 * BLOCK_SIZE, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *pages, slots, ISA)


def batch_of(lengths: list[int], asking: list[int], tables: list[list[int]]) -> Any:
    width = max(len(table) for table in tables)
    starts = torch.tensor(np.cumsum([0, *asking]), dtype=torch.int32)
    padded = [table + [0] * (width - len(table)) for table in tables]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=sum(asking),
        max_query_len=max(asking),
        max_seq_len=max(lengths),
        block_table_tensor=torch.tensor(padded, dtype=torch.int32),
        slot_mapping=torch.arange(sum(asking)),
    )


def random_step(seed: int) -> tuple[Any, list[list[int]], RemoteBlocks]:
    """Prefilling, decoding and fresh sequences; some share their first blocks."""
    dice = random.Random(seed)
    free = list(range(1, NUM_BLOCKS))
    dice.shuffle(free)
    lengths, asking, tables = [], [], []
    shared = [free.pop(), free.pop()]
    for _ in range(dice.randint(1, 4)):
        first = shared[: dice.choice((0, 0, 2))]
        length = len(first) * BLOCK_SIZE + dice.randint(1, 4 * BLOCK_SIZE)
        fresh = length - len(first) * BLOCK_SIZE
        lengths.append(length)
        asking.append(dice.choice((1, min(fresh, 40), fresh)))
        tables.append([*first, *(free.pop() for _ in range(-(-fresh // BLOCK_SIZE)))])
    away = RemoteBlocks(NUM_BLOCKS)
    full = {
        block
        for length, num, table in zip(lengths, asking, tables, strict=True)
        for block in table[: (length - num) // BLOCK_SIZE]
    }
    away.set([block for block in sorted(full) if dice.random() < 0.6])
    return batch_of(lengths, asking, tables), tables, away
