"""The reference against torch's own attention, and what all kernels refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernel_cases as cases
from banaserve.kernels.interface import Batch, BlockCopies, Heads, PartialAttention
from banaserve.kernels.layouts import key_value_views
from banaserve.kernels.reference import ReferenceKernels

EXACT = cases.EXACT
Seq = cases.Seq


def dense(case):
    """Keys and values of the one sequence, ``[tokens, heads, head_size]``, in its order."""
    batch, size = case.batch, case.key.shape[1]
    tokens = torch.arange(int(batch.range_start), int(batch.range_end))
    where = batch.block_table[0].long()[tokens // size], tokens % size
    chosen = list(case.heads.kv_heads)
    return case.key[where][:, chosen].double(), case.value[where][:, chosen].double()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq", [Seq(1, 12, 0, 13), Seq(4, 9, 0, 13), Seq(4, 9, 3, 13)])
def test_the_reference_is_torch_attention(seq, causal):
    case = cases.problem((seq,), causal=causal, heads=Heads((1, 0), 3, (1, 0)))
    got = EXACT.partial_attention(*case.arguments())
    key, value = dense(case)
    query = case.query.double().view(seq.asking, 2, 3, -1)[:, [1, 0]].flatten(1, 2)
    mask = torch.arange(seq.start, seq.end) <= torch.arange(seq.asking)[:, None] + seq.position
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        key.repeat_interleave(3, 1).transpose(0, 1),
        value.repeat_interleave(3, 1).transpose(0, 1),
        attn_mask=mask if causal else None,
    )
    torch.testing.assert_close(got.output, expected.transpose(0, 1))


def test_lse_is_the_logarithm_of_the_weights():
    case = cases.problem((Seq(1, 12, 2, 9),), heads=Heads((0,), 1), causal=False)
    key, _ = dense(case)
    weights = torch.exp(key[:, 0] @ case.query[0, 0].double() * case.scale)
    got = EXACT.partial_attention(*case.arguments())
    torch.testing.assert_close(got.lse[0, 0], weights.sum().log())


@given(
    seqs=st.lists(
        st.builds(Seq, st.integers(0, 4), st.integers(0, 9), st.integers(0, 9), st.integers(0, 12)),
        min_size=1,
        max_size=3,
    ),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    causal=st.booleans(),
)
def test_a_split_anywhere_merges_to_the_whole(seqs, cuts, causal):
    case = cases.problem(tuple(seqs), causal=causal)
    cases.check_split(ReferenceKernels(), case, "cpu", tuple(cuts), torch.float32)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_the_reference_takes_the_tables_of_the_kernels(dtype):
    kernels = ReferenceKernels(torch.float32)
    cases.check_attention_case(kernels, cases.problem(dtype=dtype), "cpu")
    cases.check_merge(kernels, 3, 80, dtype, "cpu")


def test_a_page_has_the_bytes_of_its_block_head_by_head():
    cache = torch.arange(3 * 2 * 4 * 128).view(3, 4, 2, 128).transpose(1, 2).to(torch.bfloat16)
    pages = torch.zeros(1, 2 * 4 * 128 * 2, dtype=torch.uint8)
    ReferenceKernels().pack_blocks(BlockCopies(cache, torch.tensor([2]), (0, 1), pages))
    assert torch.equal(pages[0], cache[2].contiguous().view(torch.uint8).flatten())


CASE = cases.problem()
GOOD = CASE._asdict()


def _batch(**changes):
    return {"batch": Batch(**{n: changes.get(n, getattr(CASE.batch, n)) for n in Batch.__slots__})}


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("query", {"query": CASE.query[0]}),
        ("query", {"query": CASE.query.double()}),
        ("query", {"query": CASE.query[..., :48]}),
        ("query", {"query": CASE.query.transpose(1, 2).contiguous().transpose(1, 2)}),
        ("query", {"query": CASE.query[:, :3]}),
        ("key_cache", {"key": CASE.key.half()}),
        ("key_cache", {"key": CASE.key[0]}),
        ("key_cache", {"key": CASE.key.to("meta")}),
        ("value_cache", {"value": CASE.value[:, :2]}),
        ("value_cache", {"value": CASE.value.transpose(2, 3).contiguous().transpose(2, 3)}),
        ("block_table", _batch(block_table=CASE.batch.block_table.long())),
        ("query_start", _batch(query_start=CASE.batch.query_start[:-1])),
        ("query_position", _batch(query_position=CASE.batch.query_position.repeat(2)[::2])),
        ("range_start", _batch(range_start=CASE.batch.range_start.to("meta"))),
        ("range_end", _batch(range_end=CASE.batch.range_end.float())),
        ("max_range_tokens", _batch(max_range_tokens=-1)),
        ("kv_heads", {"heads": Heads((), 2)}),
        ("kv_heads", {"heads": Heads((0, 2), 2)}),
        ("kv_heads", {"heads": Heads((1, 1), 2)}),
        ("query_groups", {"heads": Heads((0, 1), 2, (0,))}),
        ("query_groups", {"heads": Heads((0, 1), 2, (0, 2))}),
        ("group_size", {"heads": Heads((0, 1), 0)}),
    ],
)
def test_a_wrong_argument_of_attention_is_named(named, changes):
    with pytest.raises(ValueError, match=rf"^{named}.*allowed"):
        EXACT.partial_attention(*{**GOOD, **changes}.values())


OUTPUT, LSE = torch.zeros(2, 3, 64), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("named", "parts"),
    [
        ("parts", []),
        ("output", [PartialAttention(OUTPUT.double(), LSE)]),
        ("output", [PartialAttention(OUTPUT, LSE), PartialAttention(OUTPUT[:1], LSE[:1])]),
        ("output", [PartialAttention(OUTPUT, LSE), PartialAttention(OUTPUT.half(), LSE)]),
        ("lse", [PartialAttention(OUTPUT, LSE.T)]),
        ("lse", [PartialAttention(OUTPUT, LSE.double())]),
    ],
)
def test_a_wrong_argument_of_merge_is_named(named, parts):
    with pytest.raises(ValueError, match=rf"^{named}.*allowed"):
        EXACT.merge(parts)


BLOCKS = BlockCopies(
    cache=torch.zeros(3, 2, 4, 128),
    block_ids=torch.tensor([1]),
    kv_heads=(1,),
    pages=torch.zeros(1, 4096, dtype=torch.uint8),
)


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("cache", {"cache": torch.zeros(3, 2, 4, 128, dtype=torch.float64)}),
        ("cache", {"cache": torch.zeros(3, 2, 4, 2, 64)}),
        ("cache", {"cache": torch.zeros(3, 2, 128, 4).transpose(2, 3)}),
        ("block_ids", {"block_ids": torch.tensor([1], dtype=torch.int32)}),
        ("block_ids", {"block_ids": torch.tensor([[1]])}),
        ("kv_heads", {"kv_heads": (2,)}),
        ("kv_heads", {"kv_heads": (0, 0)}),
        ("pages", {"pages": torch.zeros(1, 4096)}),
        ("pages", {"pages": torch.zeros(2, 4096, dtype=torch.uint8)}),
        ("pages", {"pages": torch.zeros(1, 4095, dtype=torch.uint8)}),
        ("pages", {"pages": torch.zeros(1, 8192, dtype=torch.uint8)[:, ::2]}),
    ],
)
def test_a_wrong_argument_of_packing_is_named(named, changes):
    with pytest.raises(ValueError, match=rf"^{named}:.*allowed"):
        EXACT.pack_blocks(BLOCKS._replace(**changes))


def test_views_share_memory_with_the_cache():
    cache = cases.empty_cache(3, 4, 2, 64, torch.float32)
    key, value = key_value_views(cache)
    assert key.shape == value.shape == (3, 4, 2, 64)
    key.zero_()
    value.fill_(1)
    assert sorted(cache.flatten().tolist()) == [0.0] * key.numel() + [1.0] * value.numel()
