"""Attention over pages of a KV cache that also returns its log-sum-exp.

``KernelsAttention`` replaces vLLM's implementation where the device has kernels; ``KvPages``
computes on CPU, where vLLM's kernel returns no log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from banaserve.base.errors import MigrationError
from banaserve.engine.compat.runner.hooks import window_tokens
from banaserve.kernels.interface import Batch, Heads, Kernels, PartialAttention
from banaserve.kernels.layouts import key_value_views
from banaserve.migration.modules.split_attention import AttentionStep, ReplacedAttention


class StepBatches:
    """Batch of a step in the kernels' form, made for the first layer and kept for the others."""

    def __init__(self) -> None:
        self._last: tuple[Any, Batch] | None = None

    def of(self, metadata: Any) -> Batch:
        """Return the batch of an attention's metadata, or of the values that it is built from.

        Raises:
            ValueError: Tokens attend to later tokens.
        """
        if self._last is None or self._last[0] is not metadata:
            self._last = metadata, _batch_of(metadata)
        return self._last[1]


def _batch_of(metadata: Any) -> Batch:
    if metadata.causal is not True:
        raise ValueError(f"causal: {metadata.causal}; allowed: True")
    table = getattr(metadata, "block_table", None)
    if table is None:
        table = metadata.block_table_tensor
    num_seqs = getattr(metadata, "num_reqs", len(metadata.seq_lens))
    starts, lengths = metadata.query_start_loc[: num_seqs + 1], metadata.seq_lens[:num_seqs]
    return Batch(
        block_table=table[:num_seqs],
        query_start=starts,
        query_position=lengths - starts.diff(),
        range_start=torch.zeros_like(lengths),
        range_end=lengths,
        max_range_tokens=int(metadata.max_seq_len),
    )


def write_tokens(
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    kv_heads: Sequence[int] | None = None,
) -> None:
    """Write new keys and values to their slots.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``; is changed.
        key: ``[num_tokens, num_kv_heads, head_size]``, likewise ``value``; tokens without a slot
            are left out.
        slots: Int64; a negative slot becomes slot 0, in vLLM's null block.
        kv_heads: KV heads of the cache and of the tokens that are written; None for all.
    """
    chosen = slice(None) if kv_heads is None else list(kv_heads)
    num_tokens, size = len(slots), kv_cache.shape[2]
    slots = slots.clamp(min=0)
    blocks, offsets = slots // size, slots % size
    for cache, new in zip(key_value_views(kv_cache), (key, value), strict=True):
        if kv_heads is None:
            cache[blocks, offsets] = new[:num_tokens]
        else:
            where = blocks[:, None], offsets[:, None], torch.tensor(chosen, device=slots.device)
            cache[where] = new[:num_tokens, chosen]


class KernelsAttention(ReplacedAttention):
    """Replacement of an attention's implementation, which is kept as ``inner``.

    Args:
        layer: vLLM's attention module, whose ``impl`` this object becomes.
        splits_only: True to attend with ``inner`` while all heads are here; ``inner`` keeps its KV
            in the layout that the kernels read.

    Raises:
        MigrationError: The attention uses more than keys and queries, or the kernels do not
            support it.
    """

    def __init__(
        self,
        layer: Any,
        name: str,
        kernels: Kernels,
        batches: StepBatches,
        splits_only: bool = False,
    ) -> None:
        check_plain(layer, name, kernels)
        super().__init__(layer)
        self.kernels = kernels
        self._batches = batches
        self.splits_only = splits_only
        self._heads = all_heads(layer.num_heads, layer.num_kv_heads)
        self._install(layer)

    def do_kv_cache_update(self, layer: Any, *new: torch.Tensor) -> None:
        """Write new ``key`` and ``value`` to ``kv_cache`` at ``slot_mapping``, as vLLM does."""
        if self.splits_only:
            self.inner.do_kv_cache_update(layer, *new)
            return
        key, value, kv_cache, slots = new
        write_tokens(kv_cache, key, value, slots)

    def _leaves_to_inner(self) -> bool:
        return self.splits_only

    def _fill(self, output: torch.Tensor, step: AttentionStep) -> None:
        output[:] = self.attend(step.query, step.kv_cache, step.metadata, self._heads)

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, heads: Heads
    ) -> torch.Tensor:
        """Return the attention of some KV heads, ``[num_tokens, query heads, head_size]``.

        BanaServe Eq. 6 to 9 in corrected form, see ``kernels.interface``.
        """
        key, value = key_value_views(kv_cache)
        batch = self._batches.of(metadata)
        scale = self.inner.scale
        return self.kernels.partial_attention(query, key, value, batch, heads, scale).output


def take_kernels(
    kernels: Kernels | None, attentions: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Let an engine's attentions attend with ``kernels``; None: nothing changes.

    On a CPU ``kernels`` compute all attention, since vLLM packs KV in another layout there.
    Elsewhere they compute only split attention.

    Raises:
        MigrationError: The kernels do not support one of the attentions; nothing has changed.
    """
    chosen = {name: attentions[name] for name in names if kernels is not None}
    for name, layer in chosen.items():
        assert kernels is not None
        check_plain(layer, name, kernels)
    batches = StepBatches()
    for name, layer in chosen.items():
        assert kernels is not None
        splits_only = layer.kv_cache.device.type != "cpu"
        KernelsAttention(layer, name, kernels, batches, splits_only)


def kernels_of(impl: Any) -> Kernels | None:
    """Return the kernels of an attention's implementation; None: vLLM's own.

    The attention may be split, so that another implementation wraps the one with the kernels.
    """
    while impl is not None and not isinstance(impl, KernelsAttention):
        impl = vars(impl).get("inner")
    return None if impl is None else impl.kernels


def all_heads(num_heads: int, num_kv_heads: int) -> Heads:
    """Return every KV head with the query heads of its group."""
    return Heads(tuple(range(num_kv_heads)), num_heads // num_kv_heads)


def check_plain(layer: Any, name: str, kernels: Kernels) -> None:
    """Refuse with the reason an attention that ``kernels`` would compute differently from vLLM."""
    impl = layer.impl
    for is_there, what in (
        (window_tokens(impl) is not None, "a sliding window"),
        ((impl.logits_soft_cap or 0) > 0, "a cap of the scores"),
        (getattr(impl, "alibi_slopes", None) is not None, "ALiBi"),
        (getattr(impl, "sinks", None) is not None, "attention sinks"),
    ):
        if is_there:
            raise MigrationError(f"{name} has {what}, which the kernels do not take")
    if str(layer.kv_cache_dtype) != "auto":
        raise MigrationError(
            f"{name} keeps its KV as {layer.kv_cache_dtype}, which the kernels do not take: leave "
            "--kv-cache-dtype at auto"
        )
    if layer.head_size not in kernels.head_sizes or layer.head_size_v != layer.head_size:
        raise MigrationError(
            f"{name} has heads of size {layer.head_size}, which the {kernels.name} kernels do not "
            f"take: they take {', '.join(map(str, kernels.head_sizes))}"
        )
    if (dtype := layer.kv_cache.dtype) not in kernels.dtypes:
        taken = ", ".join(str(one).removeprefix("torch.") for one in kernels.dtypes)
        raise MigrationError(
            f"{name} computes in {str(dtype).removeprefix('torch.')}, which the {kernels.name} "
            f"kernels do not take: they take {taken}"
        )
    if layer.attn_backend.forward_includes_kv_cache_update:
        raise MigrationError(
            f"{name} writes its KV while it attends ({layer.attn_backend.get_name()}): choose "
            "another --attention-backend"
        )


_BITS = 7
"""Bits of a number that every floating-point type represents exactly."""
_TENSORS_OF_A_BATCH = (
    "block_table", "query_start", "query_position", "range_start", "range_end",
)  # fmt: skip
_MAX_SCORES = 1 << 22
"""Maximum number of scores held at once; the attention of a long prompt is computed in pieces."""

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Function that writes keys and values ``[num_tokens, num_kv_heads, head_size]`` to KV slots."""


class DevicePages:
    """Keys and values in any of vLLM's GPU layouts, which our kernels read.

    On a CPU, our kernels read the keys and values that they have written themselves.
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
    ) -> PartialAttention:
        """See ``KvPages``."""
        key, value = key_value_views(kv_cache)
        num_kv_heads = key.shape[2]
        heads = Heads(tuple(range(num_kv_heads)), query.shape[1] // num_kv_heads)
        there = self._on(batch, query.device)
        part = self._kernels.partial_attention(query, key, value, there, heads, scale, causal)
        return PartialAttention(part.output.float(), part.lse)

    def _on(self, batch: Batch, device: torch.device) -> Batch:
        """Return the batch on the device, copied for a step's first layer and kept afterwards."""
        if self._batches is None or self._batches[0] is not batch:
            there = {name: getattr(batch, name).to(device) for name in _TENSORS_OF_A_BATCH}
            longest = int(batch.range_end.max()) if len(batch.range_end) else 0
            self._batches = batch, Batch(**there, max_range_tokens=longest)
        return self._batches[1]


class KvPages:
    """Keys and values in pages ``[num_kv_heads, block_size, 2 * head_size]``.

    vLLM's kernels pack keys in an order that suits the processor. The order is found by writing
    numbered keys and values, so every processor that vLLM supports will do.

    Raises:
        MigrationError: A page holds other values than those that were written.
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
        """Return the pages of a vLLM attention module with implementation ``impl``."""

        def write(
            key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            impl.do_kv_cache_update(attention, key, value, cache, slots)

        num_heads, block_size, twice = kv_cache.shape[1:]
        return cls(write, (num_heads, block_size, twice), kv_cache.dtype)

    def read(self, page: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a page's keys and values, float32 ``[num_kv_heads, block_size, head_size]``."""
        return self._key.read(page).float(), self._value.read(page).float()

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        scale: float,
        *,
        causal: bool,
    ) -> PartialAttention:
        """Return the attention over the first ``range_end`` tokens of each sequence's blocks.

        BanaServe Eq. 6 to 9 in corrected form: ``softmax(scale * q k) v``, each head by itself,
        with the logarithm of the denominator beside it. Pages are multiplied in place.

        Args:
            query: ``[num_tokens, num_heads, head_size]``.
            kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.
            batch: See ``kernels.interface``; ranges begin at 0. In host memory.
            causal: True if a token attends to no position above its own.

        Returns:
            Output and log-sum-exp, float32.
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
        return PartialAttention(output, lse)


Pages = KvPages | DevicePages
"""Attention over the pages of a KV cache, which are read in place."""


class _Order:
    """Order in a page of the elements of ``[block_size, head_size]``."""

    def __init__(self, where: torch.Tensor) -> None:
        self._where = where
        self._first = int(where[0, 0])
        self._strides = int(where[1, 0]) - self._first, int(where[0, 1]) - self._first
        rows, columns = (torch.arange(size) for size in where.shape)
        even = self._first + rows[:, None] * self._strides[0] + columns * self._strides[1]
        self._is_even = torch.equal(where, even)

    def read(self, page: torch.Tensor) -> torch.Tensor:
        """Return the elements of a page, without a copy if their distances are even."""
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
    """Attend for a sequence's scaled query ``[q, H, D]``; its first row sees up to ``last``."""
    num, heads, head_size = query.shape
    num_kv_heads, size, _ = read[0][0].shape
    group = heads // num_kv_heads
    # The query heads of a KV head are handled like more tokens.
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
