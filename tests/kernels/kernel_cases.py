"""Tables of cases for the kernels, and what must hold for each, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from banaserve.kernels.interface import Batch, BlockCopies, Heads, Kernels, PartialAttention
from banaserve.kernels.layouts import key_value_views
from banaserve.kernels.reference import ReferenceKernels

EXACT = ReferenceKernels(result_dtype=torch.float64)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# A table's entries where nothing may be read: an address far outside the cache.
NOWHERE = 2**30


class Seq(NamedTuple):
    """One sequence: how many tokens ask, where the first stands, and what range they see."""

    asking: int
    position: int
    start: int
    end: int


RAGGED = (
    Seq(1, 9, 0, 10),
    Seq(1, 9, 3, 3),
    Seq(1, 12, 6, 7),
    Seq(5, 6, 2, 11),
    Seq(3, 2, 0, 16),
    Seq(0, 5, 0, 6),
    Seq(2, 1, 4, 8),
    Seq(4, 3, 5, 8),
    Seq(1, 22, 5, 23),
)
# KV heads of the cache, query heads for each, which KV heads, and where their query heads stand.
HEADS = {
    "all heads": (2, Heads((0, 1), 1)),
    "one of three, groups of 3": (3, Heads((1,), 3)),
    "two of four, other order": (4, Heads((3, 0), 4, (3, 0))),
    "query of one group more": (2, Heads((1,), 7, (1,))),
    "one KV head for 20": (1, Heads((0,), 20)),
}


class Problem(NamedTuple):
    """Arguments of ``partial_attention``; all that no one may see is NaN."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    batch: Batch
    heads: Heads
    scale: float
    causal: bool

    def on(self, device: str) -> Problem:
        batch = Batch(
            *(getattr(self.batch, name).to(device) for name in Batch.__slots__[:-1]),
            self.batch.max_range_tokens,
        )
        # ``to`` would keep the strides of a dense tensor only.
        whole = self.key._base.to(device)
        key, value = (
            whole.as_strided(view.shape, view.stride(), view.storage_offset())
            for view in (self.key, self.value)
        )
        return self._replace(query=self.query.to(device), key=key, value=value, batch=batch)

    def ranged(self, start: torch.Tensor, end: torch.Tensor) -> Problem:
        batch = self.batch
        parts = (batch.block_table, batch.query_start, batch.query_position, start, end)
        return self._replace(batch=Batch(*parts))

    def arguments(self) -> tuple:
        return tuple(self)


def empty_cache(blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A cache full of NaN, of zeros for integers."""
    fill = float("nan") if dtype.is_floating_point else 0
    return torch.full((blocks, heads, size, 2 * dim), fill, dtype=dtype)


def problem(
    seqs: tuple[Seq, ...] = RAGGED,
    *,
    dtype: torch.dtype = torch.float32,
    head_size: int = 64,
    num_kv_heads: int = 2,
    heads: Heads | None = None,
    block_size: int = 4,
    causal: bool = True,
    by_token: bool = False,
    seed: int = 0,
) -> Problem:
    """Random sequences in scattered blocks; ``by_token`` lays a block's tokens before its heads."""
    heads = heads or Heads(tuple(range(num_kv_heads)), 2)
    draws = torch.Generator().manual_seed(seed)
    width = max(-(-max(seq.end for seq in seqs) // block_size), 1)
    num_blocks = len(seqs) * width + 1
    cache = empty_cache(num_blocks, block_size, num_kv_heads, head_size, dtype)
    if by_token:
        cache = cache.flatten().view(num_blocks, block_size, num_kv_heads, -1).transpose(1, 2)
    key, value = key_value_views(cache)
    scattered = (torch.randperm(num_blocks - 1, generator=draws) + 1).view(len(seqs), width)
    table = torch.full_like(scattered, NOWHERE)
    for row, seq in enumerate(seqs):
        end = min(seq.end, seq.position + seq.asking) if causal else seq.end
        tokens = torch.arange(seq.start, max(end, seq.start)) if seq.asking else torch.arange(0)
        where = scattered[row, tokens // block_size]
        table[row, tokens // block_size] = where
        for cached in (key, value):
            drawn = torch.randn(len(tokens), len(heads.kv_heads), head_size, generator=draws)
            for i, head in enumerate(heads.kv_heads):
                cached[where, tokens % block_size, head] = drawn[:, i].to(dtype)
    asking = torch.tensor([0, *(seq.asking for seq in seqs)]).cumsum(0)
    num_query_heads = (max(heads.groups) + 1) * heads.group_size
    shape = (int(asking[-1]), num_query_heads, head_size)
    query = torch.randn(shape, generator=draws).to(dtype)
    facts = [[getattr(seq, name) for seq in seqs] for name in ("position", "start", "end")]
    lists = (torch.tensor(fact, dtype=torch.int32) for fact in facts)
    batch = Batch(table.int(), asking.int(), *lists)
    return Problem(query, key, value, batch, heads, head_size**-0.5, causal)


def assert_close(got: PartialAttention, exact: PartialAttention, dtype: torch.dtype) -> None:
    """Errors in the bounds that the dtype sets; empty rows are zero and -inf; nothing is NaN.

    A 16-bit output is rounded once and the weights before it once: one epsilon together. In float32
    only sums of many terms count.
    """
    assert got.output.dtype == dtype
    assert got.lse.dtype == torch.float32
    assert not got.output.isnan().any()
    empty = exact.lse.isinf()
    assert torch.equal(got.lse.isinf(), empty)
    assert (got.lse[empty] < 0).all()
    assert not got.output[empty].any()
    epsilon = torch.finfo(dtype).eps * (64 if dtype == torch.float32 else 1)
    error = (got.output.double() - exact.output.double()).norm()
    assert error <= epsilon * exact.output.double().norm()
    seen = exact.lse[~empty].double()
    assert ((got.lse[~empty].double() - seen).abs() <= 2e-5 * (1 + seen.abs())).all()


def check_attention_case(kernels: Kernels, case: Problem, device: str) -> None:
    case = case.on(device)
    got = kernels.partial_attention(*case.arguments())
    assert_close(got, EXACT.partial_attention(*case.arguments()), case.query.dtype)


def check_split(
    kernels: Kernels, case: Problem, device: str, cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Cut every range at the same tokens, attend to each part, and merge."""
    case = case.on(device)
    start, end = case.batch.range_start, case.batch.range_end
    parts, low = [], start
    for cut in (*sorted(cuts), 2**20):
        high = end.clamp(max=cut)
        parts.append(kernels.partial_attention(*case.ranged(low, high).arguments()))
        low = torch.maximum(start, high)
    exact = EXACT.partial_attention(*case.arguments())
    merged = kernels.merge(parts)
    if dtype == torch.float32:
        assert_close(merged, exact, dtype)
        return
    # Each part's output is rounded before the merge.
    error = (merged.output.double() - exact.output).norm()
    assert error <= min(1.5 * torch.finfo(dtype).eps, 1e-2) * exact.output.norm()
    assert not merged.output.isnan().any()


def random_parts(
    num: int, tokens: int, heads: int, dim: int, dtype: torch.dtype
) -> list[PartialAttention]:
    """Parts with lse far apart; the first token is empty everywhere, others here and there."""
    draws = torch.Generator().manual_seed(num)
    parts = []
    for i in range(num):
        output = torch.randn(tokens, heads, dim, generator=draws).to(dtype)
        lse = torch.randn(tokens, heads, generator=draws) * 20
        empty = torch.rand(tokens, heads, generator=draws) < 0.3
        empty[0] = True
        lse[empty] = float("inf") if i % 2 else float("-inf")
        output[empty] = float("nan")
        parts.append(PartialAttention(output, lse))
    return parts


def check_merge(
    kernels: Kernels, num: int, head_size: int, dtype: torch.dtype, device: str, tokens: int = 5
) -> None:
    parts = [
        PartialAttention(*(t.to(device) for t in p))
        for p in random_parts(num, tokens, 3, head_size, dtype)
    ]
    assert_close(kernels.merge(parts), EXACT.merge(parts), dtype)


def joined(parts: list[torch.Tensor], groups: Sequence[Sequence[int]]) -> torch.Tensor:
    """Separately computed heads side by side, as a split attention puts them."""
    size = parts[0].shape[1] // len(groups[0])
    number = [head * size + i for group in groups for head in group for i in range(size)]
    whole = torch.cat(parts, 1)
    return torch.empty_like(whole).index_copy_(1, torch.tensor(number, device=whole.device), whole)


def check_blocks(
    kernels: Kernels,
    by_token: bool,
    dtype: torch.dtype,
    device: str,
    block_size: int = 5,
    head_size: int = 80,
) -> None:
    """Pack heads 2 and 0 of some blocks, and unpack them into others; the rest keeps its values."""
    draws = torch.Generator().manual_seed(2)
    caches = []
    for _ in range(2):
        bits = torch.randint(0, 100, (6, 3, block_size, 2 * head_size), generator=draws)
        cache = bits.to(dtype).to(device)
        caches.append(cache.transpose(1, 2).contiguous().transpose(1, 2) if by_token else cache)
    cache, other = caches
    page_bytes = cache[0].numel() * cache.element_size()
    pages = torch.randint(0, 256, (3, page_bytes), generator=draws, dtype=torch.uint8).to(device)
    block_ids, back = (torch.tensor(ids, device=device) for ids in ([4, 1, 5], [2, 3, 0]))
    out = BlockCopies(cache, block_ids, (2, 0), pages)
    expected = pages.clone()
    EXACT.pack_blocks(out._replace(pages=expected))
    assert not torch.equal(expected, pages)
    kernels.pack_blocks(out)
    assert torch.equal(pages, expected)
    wanted = other.clone()
    into = BlockCopies(other, back, (0, 2), pages)
    EXACT.unpack_blocks(into._replace(cache=wanted))
    kernels.unpack_blocks(into)
    got, wanted, source = (one.view(torch.uint8) for one in (other, wanted, cache))
    assert torch.equal(got, wanted)
    assert torch.equal(got[back][:, [0, 2]], source[block_ids][:, [0, 2]])
