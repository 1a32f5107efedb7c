"""Attention over some pages of a KV cache that tells its log-sum-exp, as vLLM's on CPU does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from banaserve.errors import MigrationError
from banaserve.kernels.interface import Batch, Heads, Kernels, Part
from banaserve.kernels.layouts import KvLayout, key_value_views

_BITS = 7
"""Of a number that every floating-point type holds exactly."""
_TENSORS_OF_A_BATCH = (
    "block_table", "query_start", "query_position", "range_start", "range_end",
)  # fmt: skip
_MAX_SCORES = 1 << 22
"""Held at once: what a long prompt asks is answered in pieces."""

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values ``[num_tokens, num_kv_heads, head_size]`` to slots of a KV cache."""


class Pages(Protocol):
    """How attention over a KV cache is computed where it lies."""

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        scale: float,
        *,
        causal: bool,
    ) -> Part:
        """Attention over the first ``range_end`` tokens of each sequence's blocks.

        Args:
            query: ``[num_tokens, num_heads, head_size]``.
            kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.
            batch: See ``kernels.interface``; ranges begin at 0. In host memory.
            causal: Whether a token sees no position above its own.

        Returns:
            Output and log-sum-exp, float32.
        """
        ...


def pages_of(
    attention: Any, impl: Any, kv_cache: torch.Tensor, kernels: Kernels | None = None
) -> Pages:
    """Of one of vLLM's attention modules, whose implementation is ``impl``.

    Args:
        kernels: That attend with it; None: vLLM's own.

    Raises:
        MigrationError: Keys and values are not kept as they are written.
    """
    if kernels is not None:
        return DevicePages(kernels)
    return KvPages.of(attention, impl, kv_cache)


class DevicePages:
    """Keys and values as vLLM keeps them on GPUs, in any of its layouts: our kernels read them.

    On a CPU so are those that our kernels have written.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._batches: tuple[Batch, Batch] | None = None

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        scale: float,
        *,
        causal: bool,
    ) -> Part:
        """See ``Pages``."""
        key, value = key_value_views(kv_cache, KvLayout.CONTENT)
        num_kv_heads = key.shape[2]
        heads = Heads(tuple(range(num_kv_heads)), query.shape[1] // num_kv_heads)
        there = self._on(batch, query.device)
        part = self._kernels.partial_attention(query, key, value, there, heads, scale, causal)
        return Part(part.output.float(), part.lse)

    def _on(self, batch: Batch, device: torch.device) -> Batch:
        """The same batch on the device; copied for the first layer of a step, kept for the rest."""
        if self._batches is None or self._batches[0] is not batch:
            there = {name: getattr(batch, name).to(device) for name in _TENSORS_OF_A_BATCH}
            longest = int(batch.range_end.max()) if len(batch.range_end) else 0
            self._batches = batch, Batch(**there, max_range_tokens=longest)
        return self._batches[1]


class KvPages:
    """Keys and values in pages ``[num_kv_heads, block_size, 2 * head_size]``.

    vLLM's kernels pack keys in an order that suits the processor. It is found by writing numbered
    keys and values, so every processor that vLLM knows will do.

    Raises:
        MigrationError: A page holds anything else than what was written.
    """

    def __init__(self, write: Write, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        num_heads, block_size, twice = shape
        count = block_size * twice // 2
        numbers = torch.arange(2 * count)
        found = torch.zeros(2 * count, dtype=torch.int64)
        for shift in range(0, (2 * count).bit_length(), _BITS):
            digits = ((numbers >> shift) & ((1 << _BITS) - 1)).to(dtype)
            key, value = (
                part.view(block_size, 1, twice // 2).expand(-1, num_heads, -1).contiguous()
                for part in digits.chunk(2)
            )
            page = torch.zeros(1, *shape, dtype=dtype)
            write(key, value, page, torch.arange(block_size))
            found |= page[0, 0].reshape(-1).long() << shift
        where = torch.argsort(found)
        if not torch.equal(found[where], numbers):
            raise MigrationError("KV is not kept as it is written, so sequences cannot be split")
        self._key, self._value = (_Order(half.view(block_size, -1)) for half in where.chunk(2))

    @classmethod
    def of(cls, attention: Any, impl: Any, kv_cache: torch.Tensor) -> KvPages:
        """Of one of vLLM's attention modules, whose implementation is ``impl``."""

        def write(
            key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            impl.do_kv_cache_update(attention, key, value, cache, slots)

        num_heads, block_size, twice = kv_cache.shape[1:]
        return cls(write, (num_heads, block_size, twice), kv_cache.dtype)

    def read(self, page: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A page's keys and values, float32 ``[num_kv_heads, block_size, head_size]``."""
        return self._key.read(page).float(), self._value.read(page).float()

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        scale: float,
        *,
        causal: bool,
    ) -> Part:
        """See ``Pages``. Pages are multiplied where they lie.

        BanaServe Eq. 6 to 9 in corrected form: ``softmax(scale * q k) v``, each head by itself,
        with the logarithm of the denominator beside it.
        """
        output = torch.zeros(query.shape, dtype=torch.float32)
        lse = torch.full(query.shape[:2], float("-inf"))
        starts = batch.query_start.tolist()
        size = kv_cache.shape[2]
        for seq, (position, end) in enumerate(
            zip(batch.query_position.tolist(), batch.range_end.tolist(), strict=True)
        ):
            blocks = batch.block_table[seq, : -(-end // size)].tolist()
            read = [self.read(kv_cache[block]) for block in blocks]
            step = max(1, _MAX_SCORES // max(1, end * query.shape[1]))
            for first in range(starts[seq], starts[seq + 1], step) if end else ():
                rows = slice(first, min(first + step, starts[seq + 1]))
                last = position + first - starts[seq] if causal else None
                output[rows], lse[rows] = _attend(query[rows].float() * scale, read, end, last)
        return Part(output, lse)


class _Order:
    """Where in a page the elements of ``[block_size, head_size]`` lie."""

    def __init__(self, where: torch.Tensor) -> None:
        self._where = where
        self._first = int(where[0, 0])
        self._strides = int(where[1, 0]) - self._first, int(where[0, 1]) - self._first
        rows, columns = (torch.arange(size) for size in where.shape)
        even = self._first + rows[:, None] * self._strides[0] + columns * self._strides[1]
        self._is_even = torch.equal(where, even)

    def read(self, page: torch.Tensor) -> torch.Tensor:
        """Without a copy where they lie in even steps."""
        if not self._is_even:
            return page.flatten(1)[:, self._where]
        shape, strides = (len(page), *self._where.shape), (page.stride(0), *self._strides)
        return page.as_strided(shape, strides, page.storage_offset() + self._first)


def _attend(
    query: torch.Tensor,
    read: list[tuple[torch.Tensor, torch.Tensor]],
    num_tokens: int,
    last: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one sequence: scaled query ``[q, H, D]``; its first row sees up to position ``last``."""
    num, heads, head_size = query.shape
    num_kv_heads, size, _ = read[0][0].shape
    group = heads // num_kv_heads
    # The query heads of a KV head ask as more tokens would.
    rows = query.view(num, num_kv_heads, group, head_size).permute(1, 2, 0, 3).flatten(1, 2)
    scores = torch.cat([rows @ key.transpose(1, 2) for key, _ in read], -1)[..., :num_tokens]
    if last is not None:
        unseen = torch.arange(num_tokens) > last + torch.arange(num)[:, None]
        scores.view(num_kv_heads, group, num, num_tokens).masked_fill_(unseen, float("-inf"))
    lse = torch.logsumexp(scores, -1, keepdim=True)
    weights = torch.exp(scores - lse)
    output = torch.zeros_like(rows)
    for number, (_, value) in enumerate(read):
        part = weights[..., number * size : (number + 1) * size]
        output.baddbmm_(part, value[:, : part.shape[-1]])
    parts = torch.cat([output, lse], -1).view(num_kv_heads, group, num, head_size + 1)
    parts = parts.permute(2, 0, 1, 3).flatten(1, 2)
    return parts[..., :-1], parts[..., -1]
