"""A sequence whose older blocks lie elsewhere: its parts make the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from banaserve.kernels.interface import Batch, Heads
from banaserve.kernels.reference import ReferenceKernels
from banaserve.kernels.registry import pick
from banaserve.migration.kv.dirty_blocks import RemoteBlocks
from banaserve.migration.modules import paged_attention
from banaserve.migration.modules.context_split import ContextPlan, split_context
from banaserve.migration.modules.paged_attention import DevicePages, KvPages, Pages
from depth import seeds
from split_doubles import (
    BLOCK_SIZE,
    GROUP,
    HEAD_SIZE,
    NUM_BLOCKS,
    NUM_KV_HEADS,
    SCALE,
    batch_of,
    random_step,
    write,
)


@pytest.fixture(scope="module")
def pages() -> KvPages:
    return KvPages(write, (NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), torch.float32)


@pytest.mark.parametrize("seed", seeds(25, 25))
def test_parts_of_a_sequence_merge_to_the_whole(pages: KvPages, seed: int) -> None:
    common, tables, away = random_step(seed)
    plan = split_context(common, BLOCK_SIZE, away)
    gone = away.ids()
    if plan is None:
        assert not away.among(np.concatenate(tables)).any()
        return
    generator = torch.Generator().manual_seed(seed)
    shape = NUM_BLOCKS * BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    query = torch.randn(
        common.num_actual_tokens, NUM_KV_HEADS * GROUP, HEAD_SIZE, generator=generator
    )
    here = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    write(key, value, here, torch.arange(NUM_BLOCKS * BLOCK_SIZE))
    there = torch.full_like(here, float("nan"))
    there[gone] = here[gone]
    here[gone] = float("nan")
    asking = query[plan.rows]
    parts = [
        pages.attend(asking, here, plan.local, SCALE, causal=True),
        pages.attend(asking, there, plan.remote, SCALE, causal=False),
    ]
    merged = ReferenceKernels(torch.float32).merge(parts).output
    assert merged.dtype == torch.float32
    whole = attention(common, query, key, value)
    assert torch.allclose(merged.double(), whole[plan.rows], atol=2e-6)
    assert sorted([*plan.rows.tolist(), *plan.other_rows.tolist()]) == list(range(len(query)))
    if plan.others is not None:
        mine, theirs = query[plan.other_rows], whole[plan.other_rows]
        assert torch.equal(attention(plan.others, mine, key, value), theirs)
        assert plan.others.slot_mapping.tolist() == plan.other_rows.tolist()
        assert plan.others.seq_lens_cpu_upper_bound is not None
        assert torch.equal(plan.others.seq_lens_cpu_upper_bound, plan.others.seq_lens)


def attention(common: Any, query: Any, key: Any, value: Any) -> torch.Tensor:
    """Of a batch whose blocks all lie in one place, in float64."""
    asked = common.query_start_loc.diff()
    batch = Batch(
        common.block_table_tensor,
        common.query_start_loc,
        common.seq_lens - asked,
        torch.zeros_like(common.seq_lens),
        common.seq_lens,
    )
    views = (t.view(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE) for t in (key, value))
    kernels = ReferenceKernels(result_dtype=torch.float64)
    heads = Heads(tuple(range(NUM_KV_HEADS)), GROUP)
    return kernels.partial_attention(query, *views, batch, heads, SCALE).output


def test_nothing_is_asked_where_nothing_is_away() -> None:
    common = batch_of([100, 40], [1, 40], [[1, 2, 3, 4], [5, 6]])
    assert split_context(common, BLOCK_SIZE, RemoteBlocks(NUM_BLOCKS)) is None


def test_only_those_that_have_blocks_away_ask() -> None:
    away = RemoteBlocks(NUM_BLOCKS)
    away.set([2, 9])
    common = batch_of([100, 40, 70], [1, 40, 6], [[1, 2, 3, 4], [5, 6], [9, 2, 8]])
    plan = split_context(common, BLOCK_SIZE, away)
    assert isinstance(plan, ContextPlan)
    assert plan.rows.tolist() == [0, *range(41, 47)]
    assert plan.remote.block_table.tolist() == [[2, 0], [9, 2]]
    assert plan.remote.range_end.tolist() == [32, 64]
    assert plan.local.block_table.tolist() == [[1, 3, 4], [8, 0, 0]]
    assert plan.local.range_end.tolist() == [68, 6]
    assert plan.local.query_position.tolist() == [67, 0]
    assert plan.others is not None
    assert plan.others.block_table_tensor[0, :2].tolist() == [5, 6]


# ---- pages


@pytest.mark.parametrize("seed", [0, 2])
def test_pages_of_a_device_give_what_those_of_the_processor_give(pages: KvPages, seed: int) -> None:
    """The same step over vLLM's CPU pages and over plain ones, whose heads lie apart."""
    common, _, away = random_step(seed)
    plan = split_context(common, BLOCK_SIZE, away)
    assert plan is not None
    generator = torch.Generator().manual_seed(seed)
    shape = NUM_BLOCKS * BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    packed = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    write(key, value, packed, torch.arange(NUM_BLOCKS * BLOCK_SIZE))
    tokens = torch.cat([key, value], -1).view(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, -1)
    plain = tokens.permute(2, 0, 1, 3).contiguous().transpose(0, 1)
    query = torch.randn(len(plan.rows), NUM_KV_HEADS * GROUP, HEAD_SIZE, generator=generator)
    on_device: Pages = DevicePages(pick(query.device).kernels)
    for batch, causal in ((plan.local, True), (plan.remote, False)) * 2:
        one = pages.attend(query, packed, batch, SCALE, causal=causal)
        other = on_device.attend(query, plain, batch, SCALE, causal=causal)
        for mine, theirs in zip(one, other, strict=True):
            assert mine.dtype == theirs.dtype == torch.float32
            assert torch.allclose(mine, theirs, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [32, 128])
def test_pages_are_read_as_vllm_packs_them(dtype: torch.dtype, block_size: int) -> None:
    def write_any(key: Any, value: Any, cache: Any, slots: Any) -> None:
        halves = cache.view(len(cache), NUM_KV_HEADS, 2 * block_size, -1).chunk(2, dim=2)
        isa = _get_attn_isa(dtype, block_size, HEAD_SIZE)
        ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa)

    pages = KvPages(write_any, (NUM_KV_HEADS, block_size, 2 * HEAD_SIZE), dtype)
    cache = torch.zeros(3, NUM_KV_HEADS, block_size, 2 * HEAD_SIZE, dtype=dtype)
    key, value = (torch.randn(block_size, NUM_KV_HEADS, HEAD_SIZE).to(dtype) for _ in range(2))
    write_any(key, value, cache, torch.arange(block_size) + block_size)
    read = pages.read(cache[1])
    assert torch.equal(read[0], key.transpose(0, 1).float())
    assert torch.equal(read[1], value.transpose(0, 1).float())


def test_an_order_without_even_steps_is_read_too() -> None:
    """As processors have that take two keys at once."""
    order = torch.randperm(2 * BLOCK_SIZE * HEAD_SIZE, generator=torch.Generator().manual_seed(1))

    def write_mixed(key: Any, value: Any, cache: Any, slots: Any) -> None:
        both = torch.cat([key.transpose(0, 1).flatten(1), value.transpose(0, 1).flatten(1)], 1)
        cache.view(NUM_KV_HEADS, -1)[:, order] = both

    pages = KvPages(write_mixed, (NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), torch.float32)
    key, value = (torch.randn(BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE) for _ in range(2))
    cache = torch.zeros(1, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    write_mixed(key, value, cache, torch.arange(BLOCK_SIZE))
    read = pages.read(cache[0])
    assert torch.equal(read[0], key.transpose(0, 1))
    assert torch.equal(read[1], value.transpose(0, 1))


def test_a_long_prompt_is_answered_in_pieces(
    pages: KvPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = torch.randn(4, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    query = torch.randn(50, NUM_KV_HEADS * GROUP, HEAD_SIZE)
    common = batch_of([120], [50], [[3, 0, 2, 1]])
    ends = common.seq_lens
    batch = Batch(common.block_table_tensor, common.query_start_loc, ends - 50, ends * 0, ends)
    whole = pages.attend(query, cache, batch, SCALE, causal=True)
    monkeypatch.setattr(paged_attention, "_MAX_SCORES", 7 * 120 * NUM_KV_HEADS * GROUP)
    pieces = pages.attend(query, cache, batch, SCALE, causal=True)
    for one, other in zip(whole, pieces, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
