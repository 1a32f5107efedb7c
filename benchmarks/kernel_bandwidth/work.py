"""Work that the kernels are timed with: shapes of real models, also by other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.attention.bias import causal_lower_right

from banaserve.base.errors import UserError
from banaserve.kernels.interface import Batch, BlockCopies, Heads, Kernels, PartialAttention
from banaserve.kernels.layouts import key_value_views
from banaserve.kernels.registry import missing, pick

BLOCK_SIZE, HEAD_SIZE, KV_HEADS, GROUP_SIZE = 16, 128, 8, 4
# Two ways to compute the same result in bf16 differ by less than this.
_TOLERANCE = 0.015


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of all cases.

    Attributes:
        batch: Number of sequences of the batched decode.
        context: Tokens of each sequence.
        long_context: Tokens of the decode of one sequence.
        chunk: Tokens of a prefill step after ``context``.
        merge_tokens: Rows of a merge.
        layers: Number of layers that are packed one after the other.
        blocks: Number of blocks that are packed of each layer.
        copy_bytes: Size of the copy that measures bandwidth.
    """

    batch: int
    context: int
    long_context: int
    chunk: int
    merge_tokens: int
    layers: int
    blocks: int
    copy_bytes: int


SIZES = {
    "full": Sizes(64, 8192, 131072, 2048, 8192, 32, 128, 2**30),
    "tiny": Sizes(2, 48, 64, 8, 4, 2, 3, 2**16),
}


class KernelWork(NamedTuple):
    """Work to time.

    Attributes:
        name: Name of the case.
        by: Name of the library that computes it.
        num_bytes: Minimum number of bytes to read and write; 0 if arithmetic bounds the case.
    """

    name: str
    by: str
    num_bytes: int
    run: Callable[[], object]


def all_work(
    sizes: Sizes, kernels: Kernels, device: torch.device, seed: int
) -> Iterator[tuple[list[KernelWork], list[str]]]:
    """Prepare the cases in sequence, so that each has the memory to itself.

    Yields:
        The same work by our kernels, first, and by others; and why one of the others is missing.

    Raises:
        UserError: Our results and torch's differ.
    """
    torch.manual_seed(seed)
    half = tuple(range(0, KV_HEADS, 2))
    whole = tuple(range(KV_HEADS))
    for name, batch, asking, context, heads in (
        ("decode_batch", sizes.batch, 1, sizes.context, whole),
        ("decode_batch_half_heads", sizes.batch, 1, sizes.context, half),
        ("decode_long", 1, 1, sizes.long_context, whole),
        ("prefill_chunk", 1, sizes.chunk, sizes.context + sizes.chunk, whole),
    ):
        yield attention_work(name, kernels, device, batch, asking, context, heads)
    yield [merge_work(kernels, device, sizes.merge_tokens)], []
    for name, heads in (("", whole), ("_half_heads", half)):
        yield pack_work(name, kernels, device, sizes, heads), []


def attention_work(
    name: str,
    kernels: Kernels,
    device: torch.device,
    num_seqs: int,
    asking: int,
    context: int,
    kv_heads: tuple[int, ...],
) -> tuple[list[KernelWork], list[str]]:
    """Prepare causal attention of the last ``asking`` tokens of each of ``num_seqs`` contexts."""
    width = -(-context // BLOCK_SIZE)
    num_blocks = num_seqs * width
    shape = (num_blocks, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    cache = torch.randn(shape, dtype=torch.bfloat16, device=device)
    key, value = key_value_views(cache)
    table = torch.randperm(num_blocks, device=device).int().view(num_seqs, width)
    ints = torch.ones(num_seqs + 1, dtype=torch.int32, device=device)
    batch = Batch(
        table,
        torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * asking,
        ints[1:] * (context - asking),
        ints[1:] * 0,
        ints[1:] * context,
        context,
    )
    heads = Heads(kv_heads, GROUP_SIZE)
    query = torch.randn(
        num_seqs * asking, heads.num_query_heads, HEAD_SIZE, dtype=torch.bfloat16, device=device
    )
    arguments = (query, key, value, batch, heads, HEAD_SIZE**-0.5, True)
    seen = 2 * num_seqs * context * len(kv_heads) * HEAD_SIZE * cache.element_size()
    num_bytes = seen + 2 * query.numel() * query.element_size() if asking == 1 else 0
    found = [
        KernelWork(name, kernels.name, num_bytes, lambda: kernels.partial_attention(*arguments))
    ]
    found.append(KernelWork(name, "sdpa", num_bytes, _sdpa(*arguments[:5], asking, context)))
    _compare(name, found[0].run(), found[1].run())
    lacks = missing("flashinfer", device.type)
    if lacks is None and kv_heads == tuple(range(KV_HEADS)):
        flashinfer = pick(device, "flashinfer").kernels
        planned = flashinfer.plan(*arguments)  # type: ignore[attr-defined]
        found.append(KernelWork(name, "flashinfer", num_bytes, planned))
    return found, [f"flashinfer was not measured: {lacks}"] if lacks else []


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Batch,
    heads: Heads,
    asking: int,
    context: int,
) -> Callable[[], torch.Tensor]:
    """Prepare torch's attention over the same keys without blocks: contiguous, chosen heads."""
    chosen = torch.tensor(heads.kv_heads, device=query.device)
    rows, blocks = batch.block_table.shape
    dense = [
        cache[batch.block_table.flatten().long()]
        .reshape(rows, blocks * BLOCK_SIZE, KV_HEADS, HEAD_SIZE)[:, :context, chosen]
        .transpose(1, 2)
        .contiguous()
        for cache in (key, value)
    ]
    asked = query.view(rows, asking, -1, HEAD_SIZE).transpose(1, 2).contiguous()
    # A mask tensor would keep torch from its flash kernels.
    mask = causal_lower_right(asking, context) if asking > 1 else None
    attention = torch.nn.functional.scaled_dot_product_attention

    def run() -> torch.Tensor:
        output = attention(asked, *dense, attn_mask=mask, enable_gqa=True)
        return output.transpose(1, 2).reshape(query.shape)

    return run


def _compare(name: str, ours: object, theirs: object) -> None:
    output = ours.output if isinstance(ours, PartialAttention) else ours
    error = (output - theirs).float().norm() / theirs.float().norm()  # type: ignore[operator, attr-defined]
    if not error < _TOLERANCE:
        raise UserError(f"{name}: our result differs from torch's by {float(error):.3g}")


def merge_work(kernels: Kernels, device: torch.device, num_tokens: int, num: int = 4) -> KernelWork:
    """Prepare the merge of ``num`` parts of a batch of tokens in bf16."""
    heads = KV_HEADS * GROUP_SIZE
    parts = [
        PartialAttention(
            torch.randn(num_tokens, heads, HEAD_SIZE, dtype=torch.bfloat16, device=device),
            torch.randn(num_tokens, heads, device=device),
        )
        for _ in range(num)
    ]
    one = sum(tensor.numel() * tensor.element_size() for tensor in parts[0])
    return KernelWork("merge", kernels.name, (num + 1) * one, lambda: kernels.merge(parts))


def pack_work(
    name: str, kernels: Kernels, device: torch.device, sizes: Sizes, kv_heads: tuple[int, ...]
) -> list[KernelWork]:
    """Prepare copies of scattered blocks into pages and back; whole blocks by torch too."""
    shape = (2 * sizes.blocks, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    caches = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(sizes.layers)]
    blocks = torch.randperm(shape[0], device=device)[: sizes.blocks]
    pages = torch.zeros(
        sizes.layers, sizes.blocks, caches[0][0].nbytes, dtype=torch.uint8, device=device
    )
    copies = [BlockCopies(cache, blocks, kv_heads, pages[i]) for i, cache in enumerate(caches)]
    num_bytes = 2 * pages.numel() * len(kv_heads) // KV_HEADS

    def pack() -> None:
        for one in copies:
            kernels.pack_blocks(one)

    def unpack() -> None:
        for one in copies:
            kernels.unpack_blocks(one)

    def by_indexing() -> None:
        for layer, cache in zip(pages.view(torch.bfloat16), caches, strict=True):
            layer[:] = cache[blocks].flatten(1)

    found = [
        KernelWork(f"pack{name}", kernels.name, num_bytes, pack),
        KernelWork(f"unpack{name}", kernels.name, num_bytes, unpack),
    ]
    if len(kv_heads) == KV_HEADS:
        found.append(KernelWork("pack", "indexing", num_bytes, by_indexing))
        by_indexing()
        expected = pages.clone()
        pages.zero_()
        pack()
        if not torch.equal(pages, expected):
            raise UserError("pack: our bytes differ from torch's")
    return found
