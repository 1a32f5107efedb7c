"""Attention over some pages of a KV cache that tells its log-sum-exp, as vLLM's on CPU does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from banaserve.kernels.cpu_kernels import CpuKernels
from banaserve.kernels.interface import Batch, Heads, Part

KERNELS = CpuKernels()
"""Of both ends. What travels and what is merged is float32, whatever the model's type."""

_BITS = 7
"""Of a number that every floating-point type holds exactly."""

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values ``[num_tokens, num_kv_heads, head_size]`` to slots of a KV cache."""


class Selection(NamedTuple):
    """Pages, and who asks which of them.

    Attributes:
        blocks: ``[n]`` int64, ascending.
        batch: Its block table holds places in ``blocks``.
    """

    blocks: torch.Tensor
    batch: Batch


class KvPages:
    """Keys and values out of pages ``[num_kv_heads, block_size, 2 * head_size]``.

    vLLM's kernels pack keys in an order that suits the processor. It is found by writing numbered
    keys and values, so every processor that vLLM knows will do.
    """

    def __init__(self, write: Write, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        num_heads, self._block_size, twice = shape
        self._head_size = twice // 2
        count = self._block_size * self._head_size
        numbers = torch.arange(2 * count)
        found = torch.zeros(2 * count, dtype=torch.int64)
        for shift in range(0, (2 * count).bit_length(), _BITS):
            digits = ((numbers >> shift) & ((1 << _BITS) - 1)).to(dtype)
            key, value = (
                part.view(self._block_size, 1, self._head_size).expand(-1, num_heads, -1)
                for part in digits.chunk(2)
            )
            page = torch.zeros(1, *shape, dtype=dtype)
            write(key.contiguous(), value.contiguous(), page, torch.arange(self._block_size))
            found |= page[0, 0].reshape(-1).long() << shift
        where = torch.argsort(found)
        assert torch.equal(found[where], numbers), "a page is no permutation of what was written"
        self._key, self._value = where.chunk(2)

    @classmethod
    def of(cls, attention: Any, impl: Any, kv_cache: torch.Tensor) -> KvPages:
        """Of one of vLLM's attention modules, whose implementation is ``impl``."""

        def write(
            key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            impl.do_kv_cache_update(attention, key, value, cache, slots)

        num_heads, block_size, twice = kv_cache.shape[1:]
        return cls(write, (num_heads, block_size, twice), kv_cache.dtype)

    def read(
        self, kv_cache: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys and values, ``[len(blocks), block_size, num_kv_heads, head_size]``."""
        pages = kv_cache[blocks].flatten(2)
        key, value = (
            _take(pages, where)
            .view(len(blocks), -1, self._block_size, self._head_size)
            .transpose(1, 2)
            for where in (self._key, self._value)
        )
        return key, value


def attend(
    pages: KvPages,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    selection: Selection,
    scale: float,
    *,
    causal: bool,
) -> Part:
    """BanaServe Eq. 6 to 9 in corrected form over the chosen pages; see ``kernels.interface``.

    Args:
        query: ``[num_tokens, num_heads, head_size]``.
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.

    Returns:
        Output and log-sum-exp, float32.
    """
    key, value = pages.read(kv_cache, selection.blocks)
    num_kv_heads = kv_cache.shape[1]
    heads = Heads(tuple(range(num_kv_heads)), query.shape[1] // num_kv_heads)
    return KERNELS.partial_attention(query, key, value, selection.batch, heads, scale, causal)


def _take(pages: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    first, last = int(where[0]), int(where[-1])
    if last - first + 1 == len(where) and bool((where.diff() == 1).all()):
        return pages[..., first : last + 1].contiguous()
    return pages[..., where]
