"""FlashInfer's paged attention and merge behind the kernels' interface, where it is installed.

FlashInfer plans on the host, so each call of ``partial_attention`` waits for the lengths from the
GPU. Where the lengths do not change, call ``plan`` once and its result many times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from banaserve.kernels.checks import check_attention, check_parts
from banaserve.kernels.interface import Batch, Heads, PartialAttention
from banaserve.kernels.triton.kernels import TritonKernels

_WORKSPACE_BYTES = 128 * 2**20


class PagePlan(NamedTuple):
    """Ranges in FlashInfer's form: whole pages, and the length of the last page.

    Attributes:
        page_start: ``[num_seqs + 1]``, the begin of each sequence's pages in ``pages``.
        pages: Block ids of all ranges.
        last_page_tokens: ``[num_seqs]``, number of tokens in the last page, 1 to page size.
        is_causal: True if the mask is a triangle that ends with each range; False for no mask.
        is_empty: ``[num_tokens]`` bool, true for tokens that see no key.
    """

    page_start: torch.Tensor
    pages: torch.Tensor
    last_page_tokens: torch.Tensor
    is_causal: bool
    is_empty: torch.Tensor


def plan_pages(batch: Batch, page_size: int, causal: bool) -> PagePlan:
    """Convert ``batch`` to pages. Waits for its tensors; all results are on the host.

    Raises:
        ValueError: A range begins within a block, or its causal mask is neither a triangle that
            ends with the range nor absent.
    """
    table = batch.block_table.cpu()
    asked = batch.query_start.diff().cpu().tolist()
    starts, ends = batch.range_start.cpu().clamp(min=0).tolist(), batch.range_end.cpu().tolist()
    positions = batch.query_position.cpu().tolist()
    page_start, pages, last, empty, masked = [0], [], [], [], set()
    for seq, (num, position, low, high) in enumerate(
        zip(asked, positions, starts, ends, strict=True)
    ):
        high = min(high, position + num) if causal else high
        high = max(high, low) if num else low
        if high > low:
            if low % page_size:
                raise ValueError(f"range_start: {low}; allowed: multiples of {page_size}")
            if causal and num > 1 and high > position + 1:
                if high != position + num:
                    raise ValueError(f"range_end: {high}; allowed: to {position + 1} or all tokens")
                masked.add(True)
            elif num > 1:
                masked.add(False)
            pages.append(table[seq, low // page_size : -(-high // page_size)])
        page_start.append(page_start[-1] + (-(-high // page_size) - low // page_size))
        last.append((high - 1) % page_size + 1 if high > low else page_size)
        empty += [high <= low or (causal and position + i < low) for i in range(num)]
    if len(masked) > 1:
        raise ValueError("range_end: masked and unmasked sequences in one batch; allowed: one kind")
    return PagePlan(
        torch.tensor(page_start, dtype=torch.int32),
        torch.cat(pages) if pages else torch.empty(0, dtype=torch.int32),
        torch.tensor(last, dtype=torch.int32),
        masked == {True},
        torch.tensor(empty, dtype=torch.bool),
    )


class FlashInferKernels(TritonKernels):
    """Kernels with attention and merge by FlashInfer; copies, which it lacks, are Triton's."""

    name = "flashinfer"
    head_sizes: tuple[int, ...] = (64, 128, 256)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

    def __init__(self) -> None:
        super().__init__()
        self._workspaces: dict[torch.device, torch.Tensor] = {}

    def partial_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: Batch,
        heads: Heads,
        scale: float,
        causal: bool = True,
    ) -> PartialAttention:
        """See ``interface.Kernels``; supports fewer arguments: see ``plan``."""
        found = [
            self.plan(query, key_cache, value_cache, batch, some, scale, causal)()
            for some in neighbours(heads)
        ]
        if len(found) == 1:
            return found[0]
        outputs, lses = zip(*found, strict=True)
        return PartialAttention(torch.cat(outputs, 1), torch.cat(lses, 1))

    def plan(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: Batch,
        heads: Heads,
        scale: float,
        causal: bool = True,
    ) -> Callable[[], PartialAttention]:
        """Plan on the host, which waits for the GPU; return a function that only launches.

        Raises:
            ValueError: An argument is not supported. Beyond what all implementations refuse:
                float32, head sizes 80 and 96, KV heads that are not neighbours in ascending order,
                keys and values of different strides, and what ``plan_pages`` refuses.
        """
        check_attention(query, key_cache, value_cache, batch, heads)
        self._check(query, key_cache, value_cache, heads)
        pages = plan_pages(batch, key_cache.shape[1], causal)
        first, count = heads.kv_heads[0], len(heads.kv_heads)
        caches = tuple(cache[:, :, first : first + count] for cache in (key_cache, value_cache))
        wrapper = self._planned(query, key_cache.shape[1], batch, heads, pages, scale)
        size, empty = heads.group_size, pages.is_empty.to(query.device)
        asking = [group * size + i for group in heads.groups for i in range(size)]
        if asking != list(range(query.shape[1])):
            query = query[:, asking]
        query = query.contiguous()

        def run() -> PartialAttention:
            output, lse = wrapper.run(query, caches, return_lse=True)
            # FlashInfer's lse is to base 2, and it is not always -inf for an empty range.
            output.masked_fill_(empty[:, None, None], 0.0)
            return PartialAttention(
                output, (lse * math.log(2)).masked_fill(empty[:, None], float("-inf"))
            )

        return run

    def merge(self, parts: Sequence[PartialAttention]) -> PartialAttention:
        """See ``interface.Kernels``."""
        import flashinfer

        check_parts(parts)
        lses = torch.stack([lse for _, lse in parts], 1)
        empty = torch.isinf(lses)
        outputs = torch.stack([output for output, _ in parts], 1)
        outputs = outputs.masked_fill(empty[..., None], 0.0)
        lses = (lses / math.log(2)).masked_fill(empty, float("-inf"))
        output, lse = flashinfer.merge_states(outputs, lses)
        nothing = empty.all(1)
        output = output.masked_fill(nothing[..., None], 0.0)
        return PartialAttention(output, (lse * math.log(2)).masked_fill(nothing, float("-inf")))

    def _planned(
        self,
        query: torch.Tensor,
        page_size: int,
        batch: Batch,
        heads: Heads,
        pages: PagePlan,
        scale: float,
    ) -> Any:
        """Return FlashInfer's wrapper, planned and ready to run."""
        import flashinfer

        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace(query.device), "NHD", backend="fa2"
        )
        wrapper.plan(
            batch.query_start,
            pages.page_start.to(query.device),
            pages.pages.to(query.device),
            pages.last_page_tokens.to(query.device),
            heads.num_query_heads,
            len(heads.kv_heads),
            query.shape[2],
            page_size,
            causal=pages.is_causal,
            sm_scale=scale,
            q_data_type=query.dtype,
            kv_data_type=query.dtype,
        )
        return wrapper

    def _workspace(self, device: torch.device) -> torch.Tensor:
        if device not in self._workspaces:
            self._workspaces[device] = torch.empty(
                _WORKSPACE_BYTES, dtype=torch.uint8, device=device
            )
        return self._workspaces[device]

    def _check(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: Heads
    ) -> None:
        if query.dtype not in self.dtypes:
            raise ValueError(f"query: {query.dtype}; allowed by FlashInfer: {self.dtypes}")
        if (size := query.shape[2]) not in self.head_sizes:
            raise ValueError(f"query: head size {size}; allowed by FlashInfer: {self.head_sizes}")
        if len(neighbours(heads)) != 1:
            raise ValueError(
                f"kv_heads: {heads.kv_heads}; allowed by FlashInfer: neighbours, ascending"
            )
        if key.stride() != value.stride():
            raise ValueError("value_cache: other strides; allowed by FlashInfer: the key_cache's")


def neighbours(heads: Heads) -> list[Heads]:
    """Return ``heads`` in order, cut into runs of neighbouring KV heads in ascending order."""
    starts = [
        index
        for index, head in enumerate(heads.kv_heads)
        if not index or head != heads.kv_heads[index - 1] + 1
    ]
    return [
        Heads(heads.kv_heads[start:end], heads.group_size, heads.groups[start:end])
        for start, end in pairwise([*starts, len(heads.kv_heads)])
    ]
